"""The implementations of AdamW that the benchmarks compare: how each is made, where it keeps its moments, how it rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import subulp
from subulp.lab.bench.workloads import Workload
from subulp.lab.weight_only import WeightOnlyAdamW, with_torchs_noise

HYPERPARAMETERS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.5}
"""Large, so that a lost decay or a wrong update exceeds what rounding may do; they do not matter for speed."""

UNIT_ROUNDOFF = 2.0**-8
"""Largest relative error of one bf16 operation rounded to nearest (8 significant bits)."""


@dataclass(frozen=True)
class Rounding:
    """The error that an implementation's own rounding allows in a step, against the step in fp64 from the same state.

    ``weight``, ``exp_avg`` and ``exp_avg_sq`` are in ulps of the stored bf16 number, ``update`` is relative to what the
    step adds to the weight, ``scalars`` is relative to every term: fp32 arithmetic, and hyper-parameters held in fp32.
    The mean error of the ``unbiased`` tensors must also be zero, within six standard deviations.
    """

    weight: float
    exp_avg: float
    exp_avg_sq: float
    update: float = 0.0
    scalars: float = 2.0**-20
    unbiased: tuple[str, ...] = ()


ALL = ("weight", "exp_avg", "exp_avg_sq")
STOCHASTIC = Rounding(1, 1, 1, unbiased=ALL)
NEAREST = Rounding(0.5, 0.5, 0.5)
# Weight: the decay and the sum. exp_avg_sq: the product with beta2 and the sum. Update: half of exp_avg_sq's two, one each
# for the square root, the bias, eps, exp_avg and, inside addcdiv, the scalar, the product and the quotient.
OP_BY_OP = Rounding(1, 0.5, 1, update=8 * UNIT_ROUNDOFF)
# The same up to the last line, which is fp32 and stochastic.
ONETRAINER = Rounding(1.5, 0.5, 1, update=5 * UNIT_ROUNDOFF)
# 1 - beta2 ** step from fp32 numbers near 1: 2**-24 relative to 1 is 6e-5 relative to 1e-3.
FP32_SCALARS = 2.0**-13


@dataclass(frozen=True)
class Implementation:
    """An optimizer under comparison.

    ``make`` gives the optimizer for bf16 parameters. ``moments`` finds exp_avg and exp_avg_sq in it, and the part of the
    weight that is kept beside it if there is one. If ``debiased``, they are stored divided by 1 - beta ** step.
    """

    name: str
    description: str
    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    rounding: Rounding
    distribution: str = "torch"
    module: str = "torch"
    moments: Callable[[Mapping[Any, Any]], tuple[Tensor, Tensor, Tensor | None]] = lambda state: (
        state["exp_avg"],
        state["exp_avg_sq"],
        None,
    )
    debiased: bool = False
    bytes_per_parameter: int = 14
    """Read p, g and both moments, write p and both moments: the least for the tensors it keeps."""
    most_tensors: int | None = None
    """More are refused: it would compile for hours."""
    by_default: bool = True

    def obstacle(self, workload: Workload) -> str | None:
        """Why it cannot run this workload, if so."""
        if find_spec(self.module) is None:
            return f"not installed: pip install --no-deps {self.distribution}"
        if self.most_tensors is not None and len(workload.shapes) > self.most_tensors:
            return f"not tried: it compiles one graph of all {len(workload.shapes)} tensors"
        return None

    def version(self) -> str:
        return subulp.__version__ if self.distribution == "subulp" else metadata.version(self.distribution)


def _subulp(**options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda params: subulp.AdamW(params, **HYPERPARAMETERS, **options)


def _torch(**options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, **HYPERPARAMETERS, **options)


def _peer(module: str, name: str, **options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(import_module(module), name)(params, **HYPERPARAMETERS, **options)
        return optimizer

    return make


def _heavyball(compile_mode: str | None) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Its compile mode is a global of the library that it reads in every step, so it is set before each."""
    make = _peer("heavyball", "AdamW", storage_dtype="bfloat16")

    def made(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer, settings = make(params), import_module("heavyball.utils")
        optimizer.register_step_pre_hook(lambda *_: setattr(settings, "compile_mode", compile_mode))
        return optimizer

    return made


def _heavyball_moments(state: Mapping[Any, Any]) -> tuple[Tensor, Tensor, None]:
    return state[0]["update_by_adam_exp_avg_0"], state[0]["update_by_adam_exp_avg_sq_0"], None


def _kahan_moments(state: Mapping[Any, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"], state["kahan_comp"]


_WEIGHT_ONLY = Rounding(1, 0.5, 0.5, scalars=FP32_SCALARS, unbiased=("weight",))

IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("subulp", "SR of p, m and v", _subulp(), STOCHASTIC, "subulp", "subulp"),
        Implementation(
            "subulp-nearest",
            "the same, rounded to nearest",
            _subulp(stochastic_rounding=False),
            NEAREST,
            "subulp",
            "subulp",
        ),
        Implementation(
            "subulp-eager",
            "the reference backend",
            _subulp(backend="eager"),
            STOCHASTIC,
            "subulp",
            "subulp",
            by_default=False,
        ),
        Implementation("torch-fused", "nearest, one rounding a tensor", _torch(fused=True), NEAREST),
        Implementation("torch-foreach", "nearest, op by op", _torch(foreach=True), OP_BY_OP),
        Implementation("torch-loop", "nearest, op by op", _torch(foreach=False, fused=False), OP_BY_OP),
        Implementation(
            "onetrainer",
            "its scheme: SR of p, the rest op by op",
            lambda p: WeightOnlyAdamW(p, **HYPERPARAMETERS, store=with_torchs_noise(0)),
            ONETRAINER,
        ),
        Implementation(
            "torchao",
            "compiled; SR of p, m and v nearest",
            _peer("torchao.optim.adam", "_AdamW", bf16_stochastic_round=True),
            _WEIGHT_ONLY,
            "torchao",
            "torchao",
        ),
        Implementation(
            "adv_optm",
            "SR of p, m and v (bf16_sr)",
            _peer("adv_optm", "AdamW_adv", state_precision="bf16_sr"),
            STOCHASTIC,
            "adv-optm",
            "adv_optm",
        ),
        Implementation(
            "heavyball",
            "compiled; SR of p, m and v",
            _heavyball("max-autotune-no-cudagraphs"),
            Rounding(1, 1, 1, scalars=FP32_SCALARS, unbiased=ALL),
            "heavyball",
            "heavyball",
            _heavyball_moments,
            debiased=True,
            most_tensors=16,
        ),
        Implementation(
            "heavyball-eager",
            "not compiled; SR of p, m and v",
            _heavyball(None),
            Rounding(1, 1, 1, scalars=FP32_SCALARS, unbiased=ALL),
            "heavyball",
            "heavyball",
            _heavyball_moments,
            debiased=True,
        ),
        Implementation(
            "optimi",
            "Kahan sum, nearest, op by op",
            _peer("optimi", "AdamW"),
            OP_BY_OP,
            "torch-optimi",
            "optimi",
            _kahan_moments,
            debiased=True,
            bytes_per_parameter=18,
        ),
    )
}
