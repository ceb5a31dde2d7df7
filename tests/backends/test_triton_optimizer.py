"""Whole optimizers on the Triton backend, in its interpreter: same bits, device step counters, loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import subulp
from tests.bits import same_bits
from tests.models import everything, make_params, set_grads, train
from tests.specs import ELEMENTWISE, SPECS, Spec

pytest.importorskip("triton")

slow = pytest.mark.slow

SHAPES = ((3, 5), (), (0,), (33, 17), (1030,))


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def trained(
    spec: Spec, backend: str, dtype: torch.dtype = torch.bfloat16, steps: int = 3, **options: Any
) -> list[Tensor]:
    params = make_params(SHAPES, dtype)
    opt = spec.make(params, seed=5, backend=backend, **options)
    train(opt, params, steps)
    return everything(opt, params)


def check_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert same_bits(a, b), i


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, marks=() if spec.cls is subulp.AdamW and dtype == torch.bfloat16 else slow)
        for spec in SPECS
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ],
)
def test_optimizers_give_the_bits_of_the_reference(spec: Spec, dtype: torch.dtype) -> None:
    check_equal(trained(spec, "triton", dtype), trained(spec, "eager", dtype))


@slow
@pytest.mark.parametrize(("spec", "variant"), [(s, v) for s in SPECS for v in s.variants])
def test_variants_give_the_bits_of_the_reference(spec: Spec, variant: dict[str, Any]) -> None:
    check_equal(trained(spec, "triton", **variant), trained(spec, "eager", **variant))


def test_strided_parameters_and_other_gradient_dtypes() -> None:
    results = []
    for backend in ("triton", "eager"):
        params = make_params(((6, 40), (17, 9), (2, 3, 4, 4)))
        params[0].data = params[0].data.t()
        params[1].data = params[1].data[::2, 1:]
        params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
        opt = subulp.AdamW(params, lr=1e-2, backend=backend, stream=0)
        for step in range(2):
            set_grads(params, step)
            params[0].grad = params[0].grad.contiguous()
            opt.step()
        results.append(everything(opt, params))
    check_equal(*results)


@pytest.mark.parametrize(
    ("spec", "lr"),
    [
        pytest.param(spec, lr, marks=() if spec.cls is subulp.AdamW else slow)
        for spec in ELEMENTWISE
        for lr in (1e-2, torch.tensor(1e-2))
    ],
)
def test_capturable_steps_are_the_same(spec: Spec, lr: Any) -> None:
    """With capturable the scalars are computed by torch in fp64 and differ from the host's by an fp64 ulp at most, which
    changes an fp32 scalar once in 2**29; so over these steps (fixed inputs) the bits are equal."""
    check_equal(trained(spec, "triton", lr=lr, capturable=True), trained(spec, "eager", lr=lr))


def test_capturable_reads_step_and_lr_where_they_are() -> None:
    """What a graph replay does: the same launches, after the counter and the rate have changed in place."""
    params, plain = make_params(((257,),)), make_params(((257,),))
    lr = torch.tensor(1e-2)
    opt = subulp.AdamW(params, lr=lr, capturable=True, backend="triton", stream=0)
    reference = subulp.AdamW(plain, lr=1e-2, backend="eager", stream=0)
    for step in range(3):
        lr.fill_(0.01 / (step + 1))
        reference.param_groups[0]["lr"] = float(lr)
        for p, o in ((params, opt), (plain, reference)):
            set_grads(p, step)
            o.step()
    check_equal(everything(opt, params), everything(reference, plain))


@pytest.mark.parametrize("backend", ["eager", "numba", "triton"])
@pytest.mark.parametrize("capturable", [False, True])
def test_amp_scaling_unscales_and_skips(backend: str, capturable: bool) -> None:
    params, plain = make_params(SHAPES, torch.float32), make_params(SHAPES, torch.float32)
    opt = subulp.AdamW(params, lr=1e-2, backend=backend, capturable=capturable, weight_decay=0.1, stream=0)
    opt.amp_scaling = True
    reference = subulp.AdamW(plain, lr=1e-2, weight_decay=0.1, stream=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        set_grads(params, step)
        set_grads(plain, step)
        bad = step == 2
        scale = scaler.scale(torch.ones(())).item()
        for p in params:
            p.grad.mul_(scale)
            if bad and p.dim() == 2:
                p.grad.fill_(float("inf"))
        before = [t.clone() for t in everything(opt, params)]
        scaler.step(opt)
        scaler.update()
        if bad:
            check_equal(everything(opt, params), before)
        else:
            reference.step()
    # Powers of two scale and unscale fp32 gradients exactly, and a skipped step draws no noise: the same bits.
    check_equal(everything(opt, params), everything(reference, plain))
