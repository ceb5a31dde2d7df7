"""Every exported optimizer, once. The contract tests iterate over this table; adding an optimizer adds one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import subulp
from tests.rules.adafactor_reference import AdafactorReference
from tests.rules.came_reference import CAMEReference
from tests.rules.prodigy_reference import ProdigyReference
from tests.rules.sign_reference import SignReference


@dataclass(frozen=True)
class Spec:
    """An optimizer under test.

    ``reference`` is an implementation by others, or the paper written again, in the parameter's own precision.
    ``variants`` are hyper-parameters that change the formula, with values that let each part of it matter.
    """

    cls: type[subulp.optimizer.Optimizer]
    reference: Callable[..., torch.optim.Optimizer]
    defaults: dict[str, Any] = field(default_factory=dict)
    variants: tuple[dict[str, Any], ...] = ({},)
    elementwise: bool = True
    """False: sums over whole parameters come first, so no complex parameters, no capture, no differentiable mode."""

    @property
    def name(self) -> str:
        return self.cls.__name__

    def make(self, params: Any, **options: Any) -> subulp.optimizer.Optimizer:
        """An optimizer that draws the noise of every other one made here: tests compare two in one process."""
        return self.cls(params, **{**self.defaults, "stream": 0, **options})

    def __repr__(self) -> str:
        return self.name


SPECS = [
    Spec(
        subulp.AdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1},
        (
            {},
            {"amsgrad": True, "betas": (0.8, 0.6)},
            {"betas": (0.5, 0.9), "eps": 0.1},
            {"maximize": True},
            {"weight_decay": 0.0},
        ),
    ),
    Spec(
        subulp.Adam,
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1},
        (
            {},
            {"amsgrad": True, "betas": (0.8, 0.6)},
            {"weight_decay": 0.0, "eps": 0.1},
            {"decoupled_weight_decay": True},
            {"decoupled_weight_decay": True, "amsgrad": True, "betas": (0.8, 0.6)},
        ),
    ),
    Spec(
        subulp.SGD,
        torch.optim.SGD,
        {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9},
        ({}, {"momentum": 0.0}, {"nesterov": True}, {"dampening": 0.5}),
    ),
    Spec(subulp.Lion, SignReference, {"lr": 1e-3, "weight_decay": 0.1}, ({}, {"betas": (0.5, 0.9)})),
    Spec(subulp.SignSGD, SignReference, {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9}, ({}, {"momentum": 0.0})),
    Spec(
        subulp.Adafactor,
        AdafactorReference,
        {"lr": 1e-2, "weight_decay": 0.1, "semantics": "torch"},
        (
            {},
            {"beta1": 0.9},
            {"eps": (0.3, 2.0), "clip_threshold": 0.5, "decay_rate": -0.5},
            {"lr": 1.0, "eps": (None, 1e-3)},  # the step size is 1 / sqrt(t)
            {"semantics": "transformers", "lr": None},
            {"semantics": "transformers", "lr": None, "warmup_init": True, "weight_decay": 1e3, "beta1": 0.5},
            {"semantics": "transformers", "relative_step": False, "scale_parameter": False, "beta1": 0.9},
            {"semantics": "transformers", "relative_step": False, "eps": (0.3, 2.0), "clip_threshold": 0.5},
        ),
        elementwise=False,
    ),
    Spec(
        subulp.CAME,
        CAMEReference,
        {"lr": 1e-2, "weight_decay": 0.1},
        (
            {},
            {"bias_correction": True},
            {"clip_threshold": 0.3, "betas": (0.5, 0.7, 0.8)},
            {"eps": (0.3, 0.1), "weight_decay": 1.0},
        ),
        elementwise=False,
    ),
    Spec(
        subulp.Prodigy,
        ProdigyReference,
        {"weight_decay": 0.1, "d0": 1.0},
        (
            {},
            {"decouple": False},
            {"use_bias_correction": True, "safeguard_warmup": True, "d0": 1e-2, "d_coef": 50.0},
            {"d0": 1e-2, "betas": (0.5, 0.8), "beta3": 0.6, "eps": 0.1},
            {"d0": 1e-2, "growth_rate": 1.5, "d_coef": 2.0},
            {"d0": 1e-2, "slice_p": 3, "decouple": False, "weight_decay": 0.5},
        ),
        elementwise=False,
    ),
    Spec(
        # Its AdamW groups; tests/rules/test_muon.py has the matrices.
        subulp.Muon,
        lambda params, use_muon, **options: torch.optim.AdamW(params, **{"betas": (0.9, 0.95), **options}),
        {"lr": 1e-2, "weight_decay": 0.1, "use_muon": False},
        ({}, {"betas": (0.5, 0.8)}),
        elementwise=False,
    ),
]

ELEMENTWISE = [spec for spec in SPECS if spec.elementwise]


def others_slow(cases: Sequence[Any]) -> list[Any]:
    """The cases of a parameter, all but the first marked slow."""
    return [pytest.param(case, marks=() if i == 0 else pytest.mark.slow) for i, case in enumerate(cases)]


def first_fast(specs: list[Spec]) -> Any:
    """For tests that compile kernels of their own: the first optimizer in the fast suite, the others marked slow."""
    return pytest.mark.parametrize(
        "spec", [pytest.param(s, id=s.name, marks=() if s is SPECS[0] else pytest.mark.slow) for s in specs]
    )
