"""Whether an optimizer's step is right: each step against the same step in fp64, from the state that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subulp.lab.bench.peers import HYPERPARAMETERS, Implementation
from subulp.lab.bench.workloads import Data

GRADIENT_SCALES = (1.0, -0.5, 2.0)
"""The checked steps multiply the gradients by these, so that the moments and their bias corrections differ."""

SAMPLE = 1 << 14
"""Elements checked of a larger tensor, evenly spaced."""


@dataclass(frozen=True)
class Stored:
    """What an implementation stores, as 1-d fp64 tensors of the sampled elements."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    carried: Tensor
    """The part of the weight that is kept beside it (zero without Kahan summation)."""


def find_fault(
    implementation: Implementation, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], data: Data
) -> str | None:
    """Makes a new optimizer's first steps and returns what is wrong with them, or None.

    A sampled element is wrong if it differs from the fp64 step by more than ``implementation.rounding`` allows; a tensor
    whose rounding should be unbiased is wrong if its mean error is beyond six standard deviations. Gradients are those of
    ``data``, times GRADIENT_SCALES.
    """
    before = _read(implementation, optimizer, params)
    for step, scale in enumerate(GRADIENT_SCALES, 1):
        for p, gradient in zip(params, data.gradients, strict=True):
            p.grad = gradient * scale
        gradients = _sample([p.grad for p in params if p.grad is not None])
        optimizer.step()
        after = _read(implementation, optimizer, params)
        fault = _compare(implementation, before, gradients, after, step)
        if fault is not None:
            return f"wrong result at step {step}: {fault}"
        before = after
    return None


def _compare(implementation: Implementation, before: Stored, gradient: Tensor, after: Stored, step: int) -> str | None:
    rounding = implementation.rounding
    lr, (beta1, beta2) = HYPERPARAMETERS["lr"], HYPERPARAMETERS["betas"]
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    old1, old2 = (1 - beta1 ** (step - 1), 1 - beta2 ** (step - 1)) if implementation.debiased else (1.0, 1.0)
    unit1, unit2 = (bias1, bias2) if implementation.debiased else (1.0, 1.0)
    terms1 = (beta1 * old1 * before.exp_avg, (1 - beta1) * gradient)
    terms2 = (beta2 * old2 * before.exp_avg_sq, (1 - beta2) * gradient.square())
    exp_avg, exp_avg_sq = sum(terms1), sum(terms2)
    update = lr / bias1 * exp_avg / ((exp_avg_sq / bias2).sqrt() + HYPERPARAMETERS["eps"])
    weight = before.weight + before.carried - lr * HYPERPARAMETERS["weight_decay"] * before.weight - update
    slack = rounding.scalars
    expected = {
        "weight": (
            after.weight,
            weight,
            ulp(torch.maximum(before.weight.abs(), weight.abs())),
            (rounding.update + slack) * update.abs() + slack * before.weight.abs(),
        ),
        "exp_avg": (
            after.exp_avg,
            exp_avg / unit1,
            ulp(torch.maximum(before.exp_avg.abs(), (exp_avg / unit1).abs())),
            slack * (terms1[0].abs() + terms1[1].abs()) / unit1,
        ),
        "exp_avg_sq": (
            after.exp_avg_sq,
            exp_avg_sq / unit2,
            ulp(torch.maximum(before.exp_avg_sq, exp_avg_sq / unit2)),
            slack * exp_avg_sq / unit2,
        ),
    }
    for name, (got, wanted, unit, extra) in expected.items():
        error = (got - wanted) / unit
        allowed = getattr(rounding, name) + extra / unit
        excess = error.abs() - allowed
        if not bool((excess <= 0).all()):  # a NaN is wrong, too
            i = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
            return f"{name} is {error[i]:+.2f} ulp off, {allowed[i]:.2f} allowed"
        # The error of a stochastic rounding is independent, of mean 0 and standard deviation at most 1/2 ulp.
        bias, bound = float(error.mean()), 3 / len(error) ** 0.5 + float((extra / unit).mean())
        if name in rounding.unbiased and abs(bias) > bound:
            return f"the mean error of {name} is {bias:+.4f} ulp, {bound:.4f} allowed"
    return None


def ulp(x: Tensor) -> Tensor:
    """The spacing of bf16 numbers in the binade of fp64 ``x``: 8 significant bits, down to 2**-133."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), (exponent - 8).clamp(min=-133))


def _read(implementation: Implementation, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Stored:
    weight = _sample([p.detach() for p in params])
    # Whatever state there is before the first step is zero.
    moments = [implementation.moments(optimizer.state[p]) for p in params if _has_stepped(optimizer, p)]
    if not moments:
        return Stored(weight, *(torch.zeros_like(weight),) * 3)
    exp_avg, exp_avg_sq, carried = zip(*moments, strict=True)
    zero = torch.zeros_like(weight)
    kept = [part for part in carried if part is not None]
    return Stored(weight, _sample(exp_avg), _sample(exp_avg_sq), _sample(kept) if kept else zero)


def _has_stepped(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    return bool(optimizer.state.get(p))


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    parts = []
    for t in tensors:
        flat = t.flatten()
        parts.append(flat[:: -(-len(flat) // SAMPLE)].double())
    return torch.cat(parts)
