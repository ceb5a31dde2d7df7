"""Every elementwise optimizer: what stochastic rounding must keep in the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.models import generator
from tests.specs import ELEMENTWISE

elementwise = pytest.mark.parametrize("spec", ELEMENTWISE, ids=str)


@elementwise
def test_the_mean_in_bf16_follows_fp32(spec):
    """4096 equal elements: their mean in bf16 follows the one value of fp32, by steps far below an ulp."""
    steps, count, lr = 200, 4096, 1e-4
    p, q = (Parameter(torch.full((count,), 0.75, dtype=d)) for d in (torch.bfloat16, torch.float32))
    opts = [spec.make([t], lr=lr) for t in (p, q)]
    g = generator(2)
    for _ in range(steps):
        gradient = (1 + torch.randn((), generator=g)).bfloat16().float()  # mostly of one sign, exact in bf16
        for t, opt in zip((p, q), opts, strict=True):
            t.grad = torch.full_like(t, float(gradient))
            opt.step()
    exact, mean = float(q.detach()[0]), float(p.detach().double().mean())
    assert 0.75 - exact > 2.0**-9  # nearest would not have moved
    # Roundings of the weight: each step has a variance of at most q ulp**2, with q ulp the step. Those of the states move the
    # update: relative sd under 2**-8 a step, averaged over the elements. Five standard errors.
    ulp = 2.0**-8
    weight = math.sqrt((0.75 - exact) * ulp * 2)
    states = steps * lr * 10 * 2.0**-8
    assert abs(mean - exact) < 5 * (weight + states) / math.sqrt(count) + 1e-6


@elementwise
def test_decay_alone_follows_its_closed_form(spec):
    """Zero gradients. Decoupled decay, and SGD's: p shrinks by lr * decay a step. Adam's goes through its moments."""
    options: dict[str, Any] = {}
    if spec.cls is subulp.Adam:
        options = {"decoupled_weight_decay": True}
    elif spec.cls is subulp.SGD:
        options = {"momentum": 0.0}
    steps, count = 500, 4096
    p = Parameter(torch.full((count,), 0.7, dtype=torch.bfloat16))
    start = float(p.detach()[0])
    opt = spec.make([p], lr=1e-3, weight_decay=0.02, **options)
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        opt.step()
    exact = start * (1 - 2e-5) ** steps
    # A step's rounding has variance q (1 - q) ulp**2 with q = 1.4e-5 / 2**-8 = 0.0036: 500 give sd 1.34 ulp an element. Five
    # standard errors of the mean: false alarm 6e-7.
    bound = 5 * 1.34 * 2.0**-8 / math.sqrt(count)
    assert abs(float(p.detach().double().mean()) - exact) < bound
    assert start - exact > 2 * bound
