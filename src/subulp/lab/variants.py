"""Four ways to store the weights, gradients and states of AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import subulp

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.1

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Variant:
    """A name, the dtype of everything stored, and the optimizer."""

    name: str
    description: str
    dtype: torch.dtype
    make_optimizer: Callable[[Named, int], torch.optim.Optimizer]


def _torch(weights: Named, seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([w for _, w in weights], betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def _onetrainer(weights: Named, seed: int) -> torch.optim.Optimizer:
    return WeightOnlyAdamW([w for _, w in weights], seed)


def _subulp(weights: Named, seed: int) -> torch.optim.Optimizer:
    return subulp.AdamW(weights, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, seed=seed, stream=0)


class WeightOnlyAdamW(torch.optim.Optimizer):
    """OneTrainer's AdamW for bf16 weights: stochastic rounding of the weight, everything else rounded to nearest.

    The order of operations of its ``util/optimizer/adamw_extensions.py``: decay, both moments and the denominator are
    bf16 operations, each rounded; only the last division and sum are fp32, and are rounded stochastically.
    """

    def __init__(self, params: list[Tensor], seed: int) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.seed = seed
        for p in params:
            self.state[p].update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter; there is no closure here."""
        group, (beta1, beta2) = self.param_groups[0], BETAS
        for i, p in enumerate(group["params"]):
            state = self.state[p]
            state["step"] += 1
            p.mul_(1 - group["lr"] * WEIGHT_DECAY)
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            bias1, bias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
            denominator = (state["exp_avg_sq"].sqrt() / math.sqrt(bias2)).add_(EPS)
            subulp.addcdiv_stochastic_(
                p,
                state["exp_avg"],
                denominator,
                value=-group["lr"] / bias1,
                seed=self.seed,
                stream=i,
                step=state["step"],
            )


VARIANTS = (
    Variant("fp32", "torch.optim.AdamW, all fp32", torch.float32, _torch),
    Variant("nearest", "torch.optim.AdamW, all bf16", torch.bfloat16, _torch),
    Variant("OneTrainer", "its AdamW, all bf16: only weights round stochastically", torch.bfloat16, _onetrainer),
    Variant("subulp", "subulp.AdamW, all bf16: every store rounds stochastically", torch.bfloat16, _subulp),
)
"""The first is the reference."""
