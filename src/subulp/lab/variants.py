"""Four ways to store the weights, gradients and states of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import subulp
from subulp.lab.weight_only import WeightOnlyAdamW, with_subulps_noise

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
    return WeightOnlyAdamW([w for _, w in weights], 1e-3, BETAS, EPS, WEIGHT_DECAY, with_subulps_noise(seed))


def _subulp(weights: Named, seed: int) -> torch.optim.Optimizer:
    return subulp.AdamW(weights, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, seed=seed, stream=0)


VARIANTS = (
    Variant("fp32", "torch.optim.AdamW, all fp32", torch.float32, _torch),
    Variant("nearest", "torch.optim.AdamW, all bf16", torch.bfloat16, _torch),
    Variant("OneTrainer", "its AdamW, all bf16: only weights round stochastically", torch.bfloat16, _onetrainer),
    Variant("subulp", "subulp.AdamW, all bf16: every store rounds stochastically", torch.bfloat16, _subulp),
)
"""The first is the reference."""
