"""Averages must be able to fall: with zero gradients each step takes less from a state than half an ulp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.specs import others_slow

STEPS = 500
FIRST = 1000
"""The steps before, which none of the averages has seen: bias corrections and SGD's first step are past."""
UNAVERAGED = {"max_exp_avg_sq", "p0"}


@dataclass(frozen=True)
class Averages:
    """``options(beta)`` are those of the optimizer ``make`` with which each of its averages keeps ``beta`` of itself."""

    make: Callable[..., Any]
    options: Callable[[float], dict[str, Any]]
    averages: tuple[str, ...]
    factor: Callable[[float, int], float] = lambda beta, step: beta
    """What remains of the fp32 averages at a step."""
    shape: tuple[int, int] = (64, 64)


def betas(beta: float) -> dict[str, Any]:
    return {"lr": 0.0, "betas": (beta, beta)}


def momentum(beta: float) -> dict[str, Any]:
    return {"lr": 0.0, "momentum": beta}


def exponent(beta: float) -> float:
    """Adafactor keeps 1 - step**exponent; this is ``beta`` at the first step."""
    return math.log(1 - beta) / math.log(FIRST)


CASES = {
    "AdamW": Averages(subulp.AdamW, betas, ("exp_avg", "exp_avg_sq")),
    "AdamW, amsgrad": Averages(subulp.AdamW, lambda b: {**betas(b), "amsgrad": True}, ("exp_avg", "exp_avg_sq")),
    "Adam": Averages(subulp.Adam, betas, ("exp_avg", "exp_avg_sq")),
    "SGD": Averages(subulp.SGD, momentum, ("momentum_buffer",)),
    "Lion": Averages(subulp.Lion, betas, ("exp_avg",)),
    "SignSGD": Averages(subulp.SignSGD, momentum, ("momentum_buffer",)),
    "Adafactor": Averages(
        subulp.Adafactor,
        lambda b: {"lr": 0.0, "beta1": b, "decay_rate": exponent(b)},
        ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col"),
        lambda beta, step: 1 - step ** exponent(beta),
    ),
    "CAME": Averages(
        subulp.CAME,
        lambda b: {"lr": 0.0, "betas": (b, b, b)},
        ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"),
    ),
    # A rate of 0 would pause it.
    "Prodigy": Averages(
        subulp.Prodigy, lambda b: {"lr": 1.0, "betas": (b, b), "beta3": b}, ("exp_avg", "exp_avg_sq", "s")
    ),
    # Of one row, which is cheap to orthogonalise.
    "Muon": Averages(subulp.Muon, momentum, ("momentum_buffer",), shape=(1, 4096)),
    "Muon's AdamW": Averages(subulp.Muon, lambda b: {**betas(b), "use_muon": False}, ("exp_avg", "exp_avg_sq")),
}


def start(name: str, dtype: torch.dtype) -> float:
    """What every element of a state begins with, exactly. CAME's residuals are averages of the momentum's square."""
    scale = 2.0**-20 if name in ("exp_avg", "momentum_buffer") else 1.0
    return float(torch.tensor(0.7 * scale).to(dtype))


def averages_after(case: Averages, beta: float, **options: Any) -> dict[str, tuple[torch.Tensor, float]]:
    """Each average after STEPS zero gradients, and what its elements began with."""
    p = Parameter(torch.full(case.shape, 0.5, dtype=torch.bfloat16))
    opt = case.make([p], weight_decay=0.0, stream=0, **case.options(beta), **options)
    opt.init_state()
    state = opt.state[p]
    names = [s.name for s in opt.states(opt.param_groups[0], p)]
    assert {*names} - UNAVERAGED == {*case.averages}
    state["step"].fill_(FIRST)
    for name in case.averages:
        state[name].fill_(start(name, state[name].dtype))
    p.grad = torch.zeros_like(p)
    for _ in range(STEPS):
        opt.step()
    return {name: (state[name], start(name, state[name].dtype)) for name in case.averages}


@pytest.mark.parametrize("beta", others_slow([0.9999, 0.999]))
@pytest.mark.parametrize("name", CASES)
def test_averages_fall(name: str, beta: float) -> None:
    case = CASES[name]
    for state, (values, first) in averages_after(case, beta).items():
        ratio = float(values.double().mean()) / first
        if values.dtype == torch.float32:
            exact = math.prod(case.factor(beta, FIRST + step) for step in range(1, STEPS + 1))
            deviation = 0.0
        else:
            exact = beta**STEPS
            # A step takes (1 - beta) x from a stored x, a part q of the ulp there; rounding adds an error of mean 0 and
            # variance q (1 - q) ulp**2 <= (1 - beta) x ulp <= (1 - beta) 2**-7 x**2. So E[x**2] / exact**2 grows by a factor
            # of at most 1 + (1 - beta) 2**-7 / beta**2 a step, and is 1 plus the relative variance of an element.
            growth = (1 - beta) * 2.0**-7 / beta**2
            deviation = math.sqrt(math.expm1(STEPS * math.log1p(growth)) / values.numel())
        # Five standard deviations of the mean of independent elements (a false alarm once in 1.7e6; the 32 of these states
        # once in 54000 seeds; the seed is fixed), and the fp32 roundings of beta, the product and the sum in each step.
        assert abs(ratio / exact - 1) < 5 * deviation + STEPS * 3 * 2.0**-24, state
        assert 1 - exact > 20 * deviation, state


@pytest.mark.parametrize("name", others_slow(list(CASES)))
def test_nothing_falls_at_nearest(name: str) -> None:
    """So that the test above tests something: without noise no stored bit of a bf16 average changes."""
    for state, (values, first) in averages_after(CASES[name], 0.9999, stochastic_rounding=False).items():
        assert (values == first).all() == (values.dtype == torch.bfloat16), state
