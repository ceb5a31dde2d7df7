"""Every exported optimizer, once. The contract tests iterate over this table; adding an optimizer adds one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import subulp


@dataclass(frozen=True)
class Spec:
    """An optimizer under test.

    ``reference`` is an fp32 implementation by others, ``variants`` are hyper-parameters that change the formula.
    """

    cls: type[subulp.optimizer.Optimizer]
    reference: Callable[..., torch.optim.Optimizer]
    defaults: dict[str, Any] = field(default_factory=dict)
    variants: tuple[dict[str, Any], ...] = ({},)

    @property
    def name(self) -> str:
        return self.cls.__name__

    def make(self, params: Any, **options: Any) -> subulp.optimizer.Optimizer:
        return self.cls(params, **{**self.defaults, **options})

    def __repr__(self) -> str:
        return self.name


SPECS = [
    Spec(
        subulp.AdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1},
        ({}, {"amsgrad": True}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"maximize": True}, {"weight_decay": 0.0}),
    ),
]
