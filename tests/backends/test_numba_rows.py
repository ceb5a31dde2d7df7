"""Matrices updated with factors of rows and columns inside the kernel: the bits of the blocks that torch multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import subulp
from subulp.backends.numba import rows as numba_rows
from subulp.rules.came import FACTORED
from tests.bits import same_bits
from tests.models import everything, generator, make_params, train

WIDE = ((5, 128), (64, 129), (3, 300), (2, 70_001))
slow = pytest.mark.slow


@pytest.mark.parametrize("threads", [1, pytest.param(5, marks=slow)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=slow) for d in (torch.float16, torch.float32))]
)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (subulp.Adafactor, {}),
        pytest.param(subulp.Adafactor, {"beta1": 0.9, "maximize": True}, marks=slow),
        (subulp.CAME, {"lr": 1e-2, "weight_decay": 0.1}),
        pytest.param(subulp.CAME, {"lr": 1e-2, "stochastic_rounding": False, "state_dtype": "fp32"}, marks=slow),
    ],
    ids=str,
)
def test_rows_have_the_bits_of_blocks(cls, options, dtype, threads, monkeypatch):
    used = []
    run = numba_rows.run

    def counted(*arguments: Any, **options: Any) -> None:
        used.append(1)
        run(*arguments, **options)

    monkeypatch.setattr(numba_rows, "run", counted)
    results = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for backend in ("eager", "numba"):
            params = make_params(WIDE, dtype)
            opt = cls(params, backend=backend, **options, stream=0)
            train(opt, params, 3)
            results.append(everything(opt, params))
            assert len(used) == (0 if backend == "eager" else 3 * len(WIDE))
    finally:
        torch.set_num_threads(before)
    assert all(map(same_bits, *results))


def test_a_block_of_a_matrix_is_rounded_as_the_whole():
    rows, width = 9, 301
    g = generator(0)
    p, m, grad = (torch.randn(rows, width, generator=g).bfloat16() for _ in range(3))
    r, s, c, d = (torch.rand(n, generator=g) for n in (rows, rows, width, width))
    scalars = {"beta1": 0.9, "share": 0.1, "lr": 1e-2, "decay": 1e-3}
    options: dict[str, Any] = {"columns": width, "stream": 3, "step": 5, "seed": 1, "stochastic": True, "factor": 0.5}
    blocks = []
    for top, left in ((2, 0), (2, 128), (0, 129)):
        part = [t[top:, left:].clone() for t in (p, m, grad)]
        factors = {"r": r[top:].clone(), "s": s[top:].clone(), "c": c[left:].clone(), "d": d[left:].clone()}
        numba_rows.run(FACTORED, part[:2], part[2:], factors, scalars, offset=(top, left), **options)
        blocks.append((top, left, part))
    factors = {"r": r, "s": s, "c": c, "d": d}
    numba_rows.run(FACTORED, [p, m], [grad], factors, scalars, offset=(0, 0), **options)
    for top, left, part in blocks:
        assert same_bits(part[0], p[top:, left:])
        assert same_bits(part[1], m[top:, left:])


@pytest.mark.parametrize(
    "kind", ["strided", "narrow", "three dimensions", "a gradient of another layout", "a gradient in fp64"]
)
def test_what_rows_cannot_serve_has_the_same_bits(kind):
    shape = {"narrow": (200, 5), "three dimensions": (2, 3, 200)}.get(kind, (6, 200))
    results = []
    for backend in ("eager", "numba"):
        (p,) = make_params((shape,))
        if kind == "strided":
            p = torch.nn.Parameter(p.detach().t().contiguous().t())
        opt = subulp.CAME([p], lr=1e-2, backend=backend, stream=0)
        for step in range(3):
            p.grad = torch.randn(shape, generator=generator(step)).bfloat16()
            if kind == "a gradient in fp64":
                grad, p.grad, p.grad_dtype = p.grad.double(), None, None
                p.grad = grad
            elif kind == "a gradient of another layout":
                p.grad = p.grad.t().contiguous().t()
            opt.step()
        results.append(everything(opt, [p]))
    assert all(map(same_bits, *results))
