"""Gradient accumulation in bf16: small gradients count, and the optimizer sees one gradient a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

import subulp
from subulp.numerics.streams import stream_of_name
from tests.bits import same_bits


def test_small_gradients_count_in_the_mean():
    """1.0, then 63 times 2**-10: an eighth of an ulp of 2**-7, which autograd's own sum loses."""
    count, passes = 4096, 64
    p, plain = (Parameter(torch.zeros(count, dtype=torch.bfloat16)) for _ in range(2))
    subulp.GradientAccumulation([p], steps=passes)
    for i in range(passes):
        for q in (p, plain):
            (q * (1.0 if i == 0 else 2.0**-10)).sum().backward()
    exact = 1 + 63 * 2.0**-10
    assert float(plain.grad.double().mean()) == 1.0
    # A rounding has variance 1/8 * 7/8 ulp**2: 63 of them sd 2.6 ulp an element. Five standard errors: false alarm 6e-7.
    assert abs(float(p.grad.double().mean()) - exact) < 5 * math.sqrt(63 * 7 / 64) * 2.0**-7 / math.sqrt(count)


def test_fp32_is_the_plain_sum_and_steps_repeat():
    p, plain = (Parameter(torch.zeros(5)) for _ in range(2))
    accumulation = subulp.GradientAccumulation([p], steps=3)
    for step in range(2):
        for i in range(3):
            for q in (p, plain):
                (q * (i + step + 0.1)).sum().backward()
            assert (p.grad is None) == (i < 2)
        assert torch.equal(p.grad, plain.grad)
        p.grad = plain.grad = None
    accumulation.remove()
    p.sum().backward()
    assert p.grad is not None


def test_with_fused_backward_each_parameter_steps_in_the_last_pass():
    results = []
    for fused in (True, False):
        p = Parameter(torch.ones(64, dtype=torch.bfloat16))
        opt = subulp.AdamW([("p", p)], lr=1e-2)
        subulp.GradientAccumulation([("p", p)], steps=2)
        if fused:
            subulp.FusedBackward(opt)
        for step in range(3):
            for i in range(2):
                (p * (0.3 + i + step)).sum().backward()
            if not fused:
                opt.step()
                opt.zero_grad()
            assert p.grad is None
        assert float(opt.state[p]["step"]) == 3
        results.append(p.detach())
    assert same_bits(*results)


def test_parameters_that_miss_passes_are_flushed():
    used, rare = Parameter(torch.zeros(3)), Parameter(torch.zeros(3))
    accumulation = subulp.GradientAccumulation([used, rare], steps=2)
    (used.sum() + 2 * rare.sum()).backward()
    used.sum().backward()
    assert rare.grad is None
    accumulation.flush()
    assert torch.equal(rare.grad, torch.full((3,), 2.0))
    assert torch.equal(used.grad, torch.full((3,), 2.0))
    used.grad = rare.grad = None
    for _ in range(2):
        (used.sum() + rare.sum()).backward()
    assert torch.equal(rare.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("named", [True, False])
def test_noise_continues_after_a_checkpoint(named):
    def passes(p, n):
        for i in range(n):
            (p * (1.0 if i == 0 else 2.0**-10)).sum().backward()
        return p.grad

    p, q = (Parameter(torch.zeros(256, dtype=torch.bfloat16)) for _ in range(2))
    # Without names each has streams of its own, which the checkpoint brings along.
    first, second = (subulp.GradientAccumulation([("p", t) if named else t], steps=4) for t in (p, q))
    passes(p, 4)
    second.load_state_dict(first.state_dict())
    p.grad = None
    assert same_bits(passes(p, 4), passes(q, 4))


def test_noise_is_that_of_seed_name_and_addition_apart_from_the_optimizers():
    x = torch.linspace(0.5, 1, 4096).bfloat16()
    for seed in (0, 1 << 40):
        p = Parameter(torch.zeros(4096, dtype=torch.bfloat16))
        subulp.GradientAccumulation([("w", p)], steps=3, seed=seed)
        for scale in (1.0, 2.0**-9, 2.0**-9):
            (p * (x * scale)).sum().backward()
        sums = {}
        for name in ("w", "gradient.w"):
            sums[name] = x.clone()
            for step in range(2):
                subulp.add_stochastic_(sums[name], x * 2.0**-9, seed=seed, stream=stream_of_name(name), step=step)
        assert same_bits(p.grad, sums["gradient.w"])
        assert not same_bits(p.grad, sums["w"])  # the stream with which an optimizer rounds the weight


def test_misuse_is_told():
    p = Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="steps=0"):
        subulp.GradientAccumulation([p], steps=0)
    with pytest.raises(ValueError, match="2 counters for 1 parameters"):
        subulp.GradientAccumulation([p], steps=2).load_state_dict({"additions": [0, 0]})
