"""Every variant of every optimizer in fp32 against its reference in fp64, where each part of the formula counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import generator, make_params
from tests.specs import SPECS, Spec

SHAPES = ((3, 5), (7,), (8, 6), (2, 3, 4), ())
SIZES = (1.0, 3.0, 0.5, 0.1, 0.02, 0.01, 2.0, 0.3, 0.05, 0.01)
"""Of the gradients, step by step: they shrink, so that a maximum differs from what it is of, and grow again."""

RATES = (1.0, 1.0, 0.5, 2.0, 1.0, 0.25, 1.0, 1.5, 0.1, 1.0)
"""Factors of lr, step by step."""


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        pytest.param(spec, variant, id=f"{spec}-{variant}")
        for spec in SPECS
        # Maximizing is minimizing with the gradient's sign turned, which every reference can do.
        for variant in (*(v for v in spec.variants if "maximize" not in v), {"maximize": True})
    ],
)
def test_fp32_follows_the_reference_in_fp64(spec: Spec, variant: dict[str, Any]) -> None:
    params, exact = make_params(SHAPES, torch.float32), make_params(SHAPES, torch.float64)
    for p, q in zip(params, exact, strict=True):
        q.data.copy_(p.data)
    opt = spec.make(params, backend="eager", **variant)
    options = {key: value for key, value in {**spec.defaults, **variant}.items() if key != "maximize"}
    reference = spec.reference(exact, **options)
    sign = -1.0 if variant.get("maximize") else 1.0
    moved = 0.0
    for step, (size, rate) in enumerate(zip(SIZES, RATES, strict=True)):
        g = generator(step)
        for p, q in zip(params, exact, strict=True):
            # Mostly of one sign, as on a slope, or Prodigy's estimate would stay where it begins.
            p.grad = size * (torch.randn(p.shape, generator=g) + 0.7)
            q.grad = sign * p.grad.double()
        if opt.param_groups[0]["lr"] is not None:
            lr = options.get("lr", opt.defaults["lr"])
            opt.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr * rate
        before = [q.detach().clone() for q in exact]
        opt.step()
        reference.step()
        moved += max(float((q.detach() - b).abs().max()) for q, b in zip(exact, before, strict=True))
    # A step rounds the weight once. What it adds comes from a chain of under 64 roundings, states included, each 2**-24
    # relative; what is wrong in a state decays with it, so all steps may contribute. Sums are fp64.
    largest = max(float(q.detach().abs().max()) for q in exact)
    bound = 2.0**-24 * len(SIZES) * (largest + 64 * moved)
    assert moved > 100 * bound
    for p, q in zip(params, exact, strict=True):
        assert (p.detach() - q.detach()).abs().max() < bound
