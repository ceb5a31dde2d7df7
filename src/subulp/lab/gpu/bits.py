"""Bits of whole training runs on the device against the reference backend on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from subulp.lab.gpu.report import Fault, Report
from subulp.lab.gpu.setting import BF16, CPU, FP16, FP32, Setting, normal, require_equal, same_bits
from subulp.lab.tensors import written

SHAPES = ((7,), (4096, 33), (1,), (513, 1025), (64, 3, 5, 5), ())
SMALL_SHAPES = ((7,), (129, 5), (2, 3, 2, 2), ())


@dataclass(frozen=True)
class Case:
    """An optimizer, the dtype of its parameters, and its options."""

    optimizer: Callable[..., Any] = subulp.AdamW
    dtype: torch.dtype = BF16
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "AdamW bf16": Case(),
    "AdamW bf16, amsgrad": Case(options={"amsgrad": True}),
    "AdamW bf16, maximize": Case(options={"maximize": True}),
    "AdamW bf16, nearest": Case(options={"stochastic_rounding": False}),
    "AdamW bf16, fp32 states": Case(options={"state_dtype": "fp32"}),
    "AdamW bf16, fp32 exp_avg_sq": Case(options={"state_dtype": {"exp_avg_sq": "fp32"}}),
    "AdamW fp32, bf16 states": Case(dtype=FP32, options={"state_dtype": "bf16"}),
    "AdamW fp32": Case(dtype=FP32),
    "AdamW fp16": Case(dtype=FP16),
    "Adam bf16": Case(subulp.Adam),
    "SGD bf16": Case(subulp.SGD, options={"momentum": 0.9}),
    "Lion bf16": Case(subulp.Lion),
    "SignSGD bf16": Case(subulp.SignSGD, options={"momentum": 0.9}),
}


def section(setting: Setting, report: Report) -> None:
    """A check for each case, one of special values, one of the rounding functions."""
    for name, case in CASES.items():
        report.check(f"bits, {name}", partial(compare, setting, case))
    report.check("bits, special values", partial(special_values, setting))
    report.check("bits, rounding functions", partial(rounding_functions, setting))


def compare(setting: Setting, case: Case) -> str:
    """Parameters and states after some steps on both devices."""
    return require_equal(trained(setting, case, setting.device, setting.backend), trained(setting, case, CPU, "eager"))


def trained(setting: Setting, case: Case, device: torch.device, backend: str) -> list[Tensor]:
    """Everything that some steps have written; gradients from a fixed seed, another learning rate each step."""
    shapes = SMALL_SHAPES if setting.rehearsal else SHAPES
    params = [Parameter(normal(shape, i, case.dtype).to(device)) for i, shape in enumerate(shapes)]
    params[1].data = misaligned(params[1].data)
    for p in params:
        p.data = _in_its_format(p.data)
    optimizer = case.optimizer(params, lr=1e-3, weight_decay=0.1, seed=7, backend=backend, stream=0, **case.options)
    for step in range(2 if setting.rehearsal else 5):
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        for i, p in enumerate(params):
            p.grad = _in_its_format(normal(p.shape, 100 * step + i, case.dtype).to(device))
        optimizer.step()
    return written(optimizer)


def misaligned(t: Tensor) -> Tensor:
    """A contiguous copy whose first element is not at a multiple of 16 bytes."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room[1:].view(t.shape).copy_(t)


def _in_its_format(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def special_values(setting: Setting) -> str:
    """Zeros, subnormals, the ends of the range, infinities and NaN as weights and gradients, each with each."""
    values = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 1.0, 1e30, 3.38e38, math.inf, -math.inf, math.nan])
    weights, gradients = (t.reshape(-1).to(BF16) for t in torch.meshgrid(values, values, indexing="ij"))
    results = []
    for device, backend in ((setting.device, setting.backend), (CPU, "eager")):
        p = Parameter(weights.clone().to(device))
        optimizer = subulp.AdamW([p], lr=1e-3, weight_decay=0.1, seed=7, backend=backend, stream=0)
        optimizer.init_state()
        optimizer.state[p]["exp_avg"].fill_(1e-3)
        optimizer.state[p]["exp_avg_sq"].fill_(1e-5)
        p.grad = gradients.clone().to(device)
        with np.errstate(all="ignore"):  # Triton's interpreter computes with numpy
            optimizer.step()
        results.append(written(optimizer))
    frozen = ~weights.isfinite()
    if not same_bits(results[0][0].cpu()[frozen], weights[frozen]):
        raise Fault("a weight that was not finite has changed")
    return require_equal(*results, any_nan=True)


def rounding_functions(setting: Setting) -> str:
    """``round_stochastic`` to both 16-bit formats."""
    x = torch.cat([normal((100,), 3, FP32), torch.tensor([0.0, -0.0, math.inf, -math.inf, 3e38, 1e-45])])
    ours, cpu = ([subulp.round_stochastic(t, d, seed=1) for d in (BF16, FP16)] for t in (x.to(setting.device), x))
    return require_equal(ours, cpu)
