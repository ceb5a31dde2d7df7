"""One AdamW step on every backend that serves CPU tensors, compared bit for bit with the reference backend."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import subulp
from subulp.backends import registry
from subulp.lab.tensors import bits, written
from subulp.options import BACKENDS

SHAPES = ((257, 301), (1001,), (3, 5), ())
"""Odd sizes leave a tail behind every vector width; the first tensor is large enough to be split over threads."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Outcome:
    """What one backend did with tensors of one dtype."""

    backend: str
    dtypes: str
    same_bits: bool
    error: str | None
    seconds: float
    """With compilation, where the backend compiles and has no cache yet."""

    @property
    def ok(self) -> bool:
        """Whether every stored bit equals the reference's."""
        return self.error is None and self.same_bits

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, ``ok`` among them."""
        return {**asdict(self), "ok": self.ok}


def self_test() -> list[Outcome]:
    """The outcomes of all backends that say they serve CPU tensors, for each dtype."""
    outcomes = []
    for title, dtype in DTYPES.items():
        expected = step_once("eager", dtype)
        for backend in serving_cpu(dtype):
            outcomes.append(_compare(backend, title, dtype, expected))
    return outcomes


def serving_cpu(dtype: torch.dtype) -> list[str]:
    """The backends, other than the reference, that serve CPU tensors of this dtype here."""
    names = []
    for name in BACKENDS:
        if name not in ("auto", "eager"):
            try:
                registry.choose(name, torch.device("cpu"), (dtype,) * 4)
            except RuntimeError:
                continue
            names.append(name)
    return names


def _compare(backend: str, title: str, dtype: torch.dtype, expected: list[Tensor]) -> Outcome:
    start = time.perf_counter()
    same_bits, error = False, None
    try:
        actual = step_once(backend, dtype)
        same_bits = all(map(torch.equal, actual, expected))
    except Exception as problem:  # A report of a broken installation must not end at the first thing that is broken.
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(backend, title, same_bits, error, time.perf_counter() - start)


def step_once(backend: str, dtype: torch.dtype) -> list[Tensor]:
    """The bits (integer views) of every parameter and state after one step from fixed, nonzero states."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    params = [normal(shape, 0.1).requires_grad_() for shape in SHAPES]
    optimizer = subulp.AdamW(params, lr=1e-3, weight_decay=0.1, seed=1, backend=backend, stream=0)
    optimizer.init_state()
    for p in params:
        state = optimizer.state[p]
        state["step"].fill_(1000)
        state["exp_avg"].copy_(normal(p.shape, 0.01))
        state["exp_avg_sq"].copy_(normal(p.shape, 0.01).square())
        p.grad = normal(p.shape, 0.01)
    optimizer.step()
    return list(map(bits, written(optimizer)))
