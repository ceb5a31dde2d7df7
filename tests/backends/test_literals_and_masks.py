"""Formulas with numbers in them, and rounding by tensor, on every backend; what "eager" must not use; sums and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import subulp
from subulp.backends import eager
from subulp.backends.bucket import single
from subulp.formula.rule import Rule, State
from subulp.numerics.views import flat_views
from tests.bits import same_bits
from tests.models import everything, generator, make_params, train


def with_literals(p, m, g, a, b):
    m = m * 0.9 + 3 * g
    return p - (0.1 * p + a * b * 2.0 * m), m


LITERALS = Rule(with_literals, (State("m"),))


def results(backend: Any, dtype: torch.dtype, stochastic: bool | tuple[bool, ...] = True) -> list[torch.Tensor]:
    g = generator(4)
    p, m, grad = (torch.randn(1003, generator=g).to(dtype) for _ in range(3))
    bucket = single(flat_views([p, m], [grad]), 5, 7, (0.3, 0.7))
    backend.run(LITERALS, bucket, seed=3, stochastic=stochastic)
    return [p, m]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stochastic", [True, False, (True, False), (False, True)], ids=str)
def test_literals_and_scalars_among_themselves_are_fp32(dtype, stochastic, monkeypatch):
    expected = results(eager, dtype, stochastic)
    numba_cpu = pytest.importorskip("subulp.backends.numba.launch")
    assert all(map(same_bits, results(numba_cpu, dtype, stochastic), expected))
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from subulp.backends.triton import launch as triton_gpu

    with np.errstate(all="ignore"):
        assert all(map(same_bits, results(triton_gpu, dtype, stochastic), expected))


@pytest.mark.parametrize("cls", [subulp.Adafactor, subulp.CAME, subulp.Prodigy, subulp.Muon, subulp.AdamW])
def test_eager_uses_no_numba(cls, monkeypatch):
    """A broken Numba can be avoided."""

    def broken(*args: Any) -> Any:
        raise AssertionError("Numba")

    params = make_params(((64, 130),))
    options = {"lr": 1e-3} if cls in (subulp.CAME, subulp.Muon) else {}
    opt = cls(params, backend="eager", **options)
    monkeypatch.setattr("subulp.backends.numba.launch.kernel_for", broken, raising=False)
    for kernel in ("sums_kernel", "factored_kernel", "finish_kernel"):
        monkeypatch.setattr(f"subulp.backends.numba.matrices.{kernel}", broken)
    train(opt, params, 2)


@pytest.mark.parametrize("cls", [subulp.Adafactor, subulp.CAME, subulp.Prodigy])
def test_training_does_not_depend_on_threads(cls):
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            params = make_params(((300, 515), (70_000,)))
            opt = cls(params, stream=0, **({"lr": 1e-3} if cls is subulp.CAME else {}))
            train(opt, params, 3)
            found.append(everything(opt, params))
            if cls is subulp.Prodigy:
                found[-1].append(opt.param_groups[0]["d_numerator"])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(same_bits, found[0], other))


@pytest.mark.parametrize("cls", [subulp.AdamW, subulp.Adam])
@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_second_moments_hold_what_torchs_hold(cls, backend, dtype):
    """0.001 * 5e20**2 is below fp32's largest number, 5e20**2 is not."""
    p = torch.nn.Parameter(torch.ones(300, dtype=dtype))
    opt = cls([p], backend=backend)
    p.grad = torch.full_like(p, 5e20)
    opt.step()
    assert opt.state[p]["exp_avg_sq"].isfinite().all()
    assert p.isfinite().all()
    assert (p != 1).any()


def test_adafactors_zero_gradients_with_torchs_defaults():
    """A NaN for a zero gradient, and one zero column poisoned the whole matrix."""
    ours, theirs = (make_params(((6, 7), (5,)), torch.float32) for _ in range(2))
    opt, other = subulp.Adafactor(ours, semantics="torch"), torch.optim.Adafactor(theirs)
    for step in range(3):
        for p, q in zip(ours, theirs, strict=True):
            grad = torch.randn(p.shape, generator=generator(step)) * (0 if step == 0 else 1)
            grad[..., 2] = 0
            p.grad, q.grad = grad.clone(), grad.clone()
        opt.step()
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            # fp32 with the same operations in another order: an ulp or two of numbers near 1 a step.
            assert (p.detach() - q.detach()).abs().max() < (step + 1) * 2.0**-21
