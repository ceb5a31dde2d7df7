"""Which backend serves a bucket: an explicit request that cannot be met raises; "auto" picks the fastest and can tell why."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.batch import Batch
from subulp.formula.rule import Rule
from subulp.storage import CODECS

INSTALL_NUMBA = "pip install 'subulp[cpu]'"
INSTALL_TRITON = "pip install triton (on Windows: triton-windows)"


def choose(name: str, device: torch.device, dtypes: Sequence[torch.dtype]) -> Any:
    """The backend module that serves tensors of this device and these dtypes.

    Raises:
        RuntimeError: the named backend cannot serve them; the message says why and what can be done.
    """
    return _module(explain(name, device, dtypes)[0])


def explain(name: str, device: torch.device, dtypes: Sequence[torch.dtype]) -> tuple[str, str]:
    """The name of the chosen backend, and why it was chosen."""
    return _choose(name, device.type, tuple(dtypes), os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _module(backend: str) -> Any:
    return importlib.import_module(_MODULES[backend])


@lru_cache(maxsize=256)
def _choose(name: str, device_type: str, dtypes: tuple[torch.dtype, ...], interpreting: bool) -> tuple[str, str]:
    if name == "eager":
        return "eager", "it was asked for"
    candidate = name if name != "auto" else _FASTEST.get(device_type)
    if candidate is None:
        return "eager", f"there are no kernels for {device_type} tensors"
    if candidate == "numba":
        obstacle = _numba_obstacle(device_type, dtypes)
    else:
        obstacle = _triton_obstacle(device_type, dtypes, interpreting)
    if obstacle is None:
        reason = "it was asked for" if name != "auto" else f"fastest for {device_type} tensors"
        return candidate, reason
    if name != "auto":
        raise RuntimeError(f"backend={name!r} cannot serve these tensors: {obstacle}.")
    if "not installed" in obstacle:
        _tell_once(f"subulp runs on its slow reference backend, with the same bits: {obstacle}.")
    return "eager", obstacle


def _numba_obstacle(device_type: str, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if device_type != "cpu":
        return f"it serves CPU tensors, these are on {device_type}; use backend='auto'"
    if find_spec("numba") is None:
        return f"numba is not installed; {INSTALL_NUMBA}"
    return _dtype_obstacle(dtypes)


def _triton_obstacle(device_type: str, dtypes: tuple[torch.dtype, ...], interpreting: bool) -> str | None:
    if device_type == "cpu" and not interpreting:
        return (
            "it serves GPU tensors, these are on the CPU, where only Triton's interpreter runs it; use backend='auto', or "
            "set TRITON_INTERPRET=1 before Python starts to try it"
        )
    if device_type not in ("cpu", "cuda", "xpu"):  # ROCm calls its devices cuda
        return f"it serves CUDA, ROCm and XPU tensors, these are on {device_type}; use backend='auto'"
    if find_spec("triton") is None:
        return f"triton is not installed; {INSTALL_TRITON}"
    return _dtype_obstacle(dtypes)


def _dtype_obstacle(dtypes: tuple[torch.dtype, ...]) -> str | None:
    other = ", ".join(sorted({str(d) for d in dtypes if d not in CODECS}))
    return f"it has no kernels for {other}; use backend='auto'" if other else None


_MODULES = {
    "eager": "subulp.backends.eager",
    "numba": "subulp.backends.numba.launch",
    "triton": "subulp.backends.triton.launch",
}
_FASTEST = {"cpu": "numba", "cuda": "triton", "xpu": "triton"}


@cache
def _tell_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def make_plan(
    rule: Rule,
    columns: Sequence[Sequence[Tensor]],
    batch: Batch,
    states: Sequence[Mapping[str, Any]],
    stochastic: bool | tuple[bool, ...],
    choices: tuple[bool | str, str],
) -> Any:
    """A reusable plan for simple parameters, or None where the backends of their buckets offer none."""
    kinds = {(tensors[0].device, *(t.dtype for t in tensors)) for tensors in zip(*columns, batch.grads, strict=True)}
    if {explain(choices[1], device, dtypes)[0] for device, *dtypes in kinds} != {"numba"}:
        return None
    if not all(state["step"].is_cpu for state in states):
        return None
    plans = importlib.import_module("subulp.backends.numba.plan")
    return plans.Plan(rule, batch, states, stochastic, choices)


def advance(counters: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """Adds one to each step counter (0-d tensors) and returns the new values."""
    if len({(counter.dtype, counter.device) for counter in counters}) == 1:
        torch._foreach_add_(list(counters), 1)
        steps: npt.NDArray[np.int64] = torch.stack(list(counters)).to(torch.int64).cpu().numpy()
        return steps
    for counter in counters:
        counter += 1
    return np.array([int(counter) for counter in counters], dtype=np.int64)
