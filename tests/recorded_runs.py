"""Cases of tests/recorded_bits.py: short trainings by every optimizer, with every variant and option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from tests.recorded_inputs import BIG_SEED, numbers

Named = Iterator[tuple[str, Tensor]]
Options = dict[str, Any]

SHAPES = ((), (1,), (3,), (129,), (7, 5), (2, 3, 5))


@dataclass(frozen=True)
class Tested:
    """An optimizer with its variants; ``states`` are those whose dtype is free, ``main`` the variants that have them all."""

    cls: Callable[..., subulp.optimizer.Optimizer]
    states: tuple[str, ...]
    defaults: Options
    variants: dict[str, Options]
    main: tuple[str, ...] = ("plain",)


_ADAM = {"lr": 1e-2, "weight_decay": 0.1}
_AMSGRAD = {"amsgrad": True, "betas": (0.8, 0.6)}
_TRANSFORMERS = {"semantics": "transformers", "lr": None}
_GIVEN_LR = {"semantics": "transformers", "relative_step": False}

OPTIMIZERS = {
    "AdamW": Tested(
        subulp.AdamW,
        ("exp_avg", "exp_avg_sq"),
        _ADAM,
        {
            "plain": {},
            "amsgrad": _AMSGRAD,
            "betas": {"betas": (0.5, 0.9), "eps": 0.1},
            "undecayed": {"weight_decay": 0.0},
        },
        ("plain", "amsgrad"),
    ),
    "Adam": Tested(
        subulp.Adam,
        ("exp_avg", "exp_avg_sq"),
        _ADAM,
        {
            "plain": {},
            "amsgrad": _AMSGRAD,
            "undecayed": {"weight_decay": 0.0, "eps": 0.1},
            "decoupled": {"decoupled_weight_decay": True},
            "decoupled-amsgrad": {"decoupled_weight_decay": True, **_AMSGRAD},
        },
        ("plain", "amsgrad"),
    ),
    "SGD": Tested(
        subulp.SGD,
        ("momentum_buffer",),
        {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9},
        {"plain": {}, "still": {"momentum": 0.0}, "nesterov": {"nesterov": True}, "dampening": {"dampening": 0.5}},
        ("plain", "nesterov"),
    ),
    "Lion": Tested(
        subulp.Lion,
        ("exp_avg",),
        {"lr": 1e-3, "weight_decay": 0.1},
        {"plain": {}, "betas": {"betas": (0.5, 0.9)}, "undecayed": {"weight_decay": 0.0}},
    ),
    "SignSGD": Tested(
        subulp.SignSGD,
        ("momentum_buffer",),
        {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9},
        {"plain": {}, "still": {"momentum": 0.0}},
    ),
    "Adafactor": Tested(
        subulp.Adafactor,
        ("exp_avg",),
        {"lr": 1e-2, "weight_decay": 0.1, "semantics": "torch"},
        {
            "plain": {},
            "momentum": {"beta1": 0.9},
            "clipped": {"eps": (0.3, 2.0), "clip_threshold": 0.5, "decay_rate": -0.5},
            "fast": {"lr": 1.0, "eps": (None, 1e-3)},
            "transformers": _TRANSFORMERS,
            "transformers-warmup": {**_TRANSFORMERS, "warmup_init": True, "weight_decay": 1e3, "beta1": 0.5},
            "transformers-lr": {**_GIVEN_LR, "scale_parameter": False, "beta1": 0.9},
            "transformers-clipped": {**_GIVEN_LR, "eps": (0.3, 2.0), "clip_threshold": 0.5},
        },
        ("momentum",),
    ),
    "CAME": Tested(
        subulp.CAME,
        ("exp_avg",),
        _ADAM,
        {
            "plain": {},
            "corrected": {"bias_correction": True},
            "clipped": {"clip_threshold": 0.3, "betas": (0.5, 0.7, 0.8)},
            "eps": {"eps": (0.3, 0.1), "weight_decay": 1.0},
        },
    ),
    "Prodigy": Tested(
        subulp.Prodigy,
        ("exp_avg", "exp_avg_sq"),
        {"weight_decay": 0.1, "d0": 1e-2},
        {
            "plain": {},
            "coupled": {"decouple": False},
            "corrected": {"use_bias_correction": True, "safeguard_warmup": True, "d_coef": 50.0},
            "betas": {"betas": (0.5, 0.8), "beta3": 0.6, "eps": 0.1},
            "growth": {"growth_rate": 1.5, "d_coef": 2.0},
            "sliced": {"slice_p": 3, "decouple": False, "weight_decay": 0.5},
        },
    ),
    "Muon": Tested(
        subulp.Muon,
        ("exp_avg", "exp_avg_sq"),
        _ADAM,
        {"plain": {}, "betas": {"betas": (0.5, 0.8), "momentum": 0.5}},
    ),
}

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32-grads": (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Run:
    """A short training. ``layout``: "one" group, several "groups", "named" parameters, or "scaled" gradients."""

    tested: Tested
    variant: Options
    dtype: torch.dtype = torch.bfloat16
    grad_dtype: torch.dtype = torch.bfloat16
    steps: int = 20
    layout: str = "one"
    options: Options = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def __call__(self, backend: str) -> Named:
        params = _parameters(self.shapes, self.dtype)
        settings = {**self.tested.defaults, "stream": 0, **self.variant, "backend": backend}
        opt = self.tested.cls(self._groups(params), **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3)
        opt.amp_scaling = self.layout == "scaled"
        for step in range(self.steps):
            for i, p in enumerate(params):
                g = numbers(p.shape, 1000 * step + i, self.grad_dtype) * 2.0 ** -(step % 5)
                if opt.amp_scaling and (step, i) == (4, 4):
                    g[0, 0] = math.inf
                if p.grad is None and g.dtype != p.dtype:
                    p.grad_dtype = None
                p.grad = g
            if not opt.amp_scaling:
                opt.step()
                continue
            scaler.scale(torch.ones(()))
            scaler.step(opt)
            scaler.update()
        yield from _stored(opt, params)

    def _groups(self, params: Sequence[Parameter]) -> Any:
        items: list[Any] = list(params)
        if self.layout == "named":
            items = [(f"module.layers.{i}.weight", p) for i, p in enumerate(params)]
        if self.tested.cls is subulp.Muon:
            common = {key: value for key, value in self.options.items() if not isinstance(value, dict)}
            matrices = {"params": [item for item, p in zip(items, params, strict=True) if p.dim() == 2], **common}
            rest = [item for item, p in zip(items, params, strict=True) if p.dim() != 2]
            return [matrices, {"params": rest, "use_muon": False, **self.options}]
        if self.layout != "groups":
            return [{"params": items, **self.options}]
        rates: list[Options] = [{}, {"lr": 0.0}, {"weight_decay": 0.25}]
        if self.tested.cls is not subulp.Prodigy:
            rates[2]["lr"] = 3e-3
        return [{"params": items[i::3], **rate, **self.options} for i, rate in enumerate(rates)]


def _parameters(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Parameter]:
    dense = [numbers(shape, i, dtype) for i, shape in enumerate(shapes)]
    strided = [numbers((4, 6), 100, dtype).t(), numbers((5, 8), 101, dtype)[:, ::2]]
    return [Parameter(t) for t in (*dense, *strided)]


def _stored(opt: subulp.optimizer.Optimizer, params: Sequence[Parameter]) -> Named:
    for number, group in enumerate(opt.param_groups):
        yield from ((f"groups.{number}.{key}", t) for key, t in sorted(group.items()) if isinstance(t, Tensor))
    for i, p in enumerate(params):
        state = opt.state[p]
        if not (isinstance(opt, subulp.Muon) and "momentum_buffer" in state):
            yield f"{i}", p.detach()
        yield from ((f"{i}.{key}", t) for key, t in sorted(state.items()) if isinstance(t, Tensor))


def _option_runs(tested: Tested) -> Iterator[tuple[str, Options]]:
    """(name, fields of the run) of what is tried with the main variants only."""
    first, last = tested.states[0], tested.states[-1]
    for name, options in {
        "seed": {"seed": BIG_SEED},
        "stream": {"stream": 2**62 + 12345},
        "maximize": {"maximize": True},
        "nearest": {"stochastic_rounding": False},
        "nearest-weight": {"stochastic_rounding": {"param": False}},
        "nearest-state": {"stochastic_rounding": {first: False}},
        "states-fp32": {"state_dtype": "fp32"},
        "states-fp16": {"state_dtype": "fp16"},
        **({"states-mixed": {"state_dtype": {first: "bf16", last: torch.float32}}} if first != last else {}),
    }.items():
        yield f"bf16/{name}", {"options": options, "steps": 10}
    for layout in ("groups", "named", "scaled"):
        yield f"bf16/{layout}", {"layout": layout, "steps": 10}
    fp16, fp32 = ({"dtype": dtype, "grad_dtype": dtype, "steps": 10} for dtype in (torch.float16, torch.float32))
    yield "fp16/nearest", {**fp16, "options": {"stochastic_rounding": False}}
    yield "fp16/scaled", {**fp16, "layout": "scaled"}
    yield "fp16/states-fp16", {**fp16, "options": {"state_dtype": "fp16"}}
    yield "fp32/states-bf16", {**fp32, "options": {"state_dtype": "bf16"}}
    yield "fp32/seed", {**fp32, "options": {"seed": BIG_SEED, "state_dtype": "fp16"}}


def _cases() -> Iterator[tuple[str, Run]]:
    for name, tested in OPTIMIZERS.items():
        for label, variant in tested.variants.items():
            for dtypes, (dtype, grad_dtype) in DTYPES.items():
                yield f"{name}/{label}/{dtypes}", Run(tested, variant, dtype, grad_dtype)
        for label in tested.main:
            for option, fields in _option_runs(tested):
                yield f"{name}/{label}/{option}", Run(tested, tested.variants[label], **fields)
    for name in ("AdamW", "Adam", "SGD", "Lion", "SignSGD"):
        yield f"{name}/plain/complex64", Run(OPTIMIZERS[name], {}, torch.complex64, torch.complex64, 5)
        yield f"{name}/plain/bf16/large", Run(OPTIMIZERS[name], {}, steps=2, shapes=((2**18 + 129,),))


RUNS = dict(_cases())
