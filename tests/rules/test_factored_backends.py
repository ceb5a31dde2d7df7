"""Adafactor and CAME on every backend: equal bits, whatever the threads, shapes and layouts."""

from __future__ import annotations

import pytest
import torch

import subulp
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
def test_backends_and_threads_give_the_same_bits(cls, options, dtype, threads):
    results = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for backend in ("eager", "numba"):
            params = make_params(WIDE, dtype)
            opt = cls(params, backend=backend, **options, stream=0)
            train(opt, params, 3)
            results.append(everything(opt, params))
    finally:
        torch.set_num_threads(before)
    assert all(map(same_bits, *results))


@pytest.mark.parametrize(
    "kind", ["strided", "narrow", "three dimensions", "a gradient of another layout", "a gradient in fp64"]
)
def test_unusual_tensors_have_the_same_bits(kind):
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
