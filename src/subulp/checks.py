"""What is checked of a parameter, its gradient and its state before a step changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from subulp.formula.rule import State
from subulp.options import DTYPES
from subulp.sharding import state_placements
from subulp.storage import ROUNDED
from subulp.torch_internals import is_dtensor

_REAL = frozenset(DTYPES.values())
PARAM_DTYPES = _REAL | {torch.complex64, torch.complex128}


def is_plain(p: Tensor, companions: Sequence[Tensor]) -> bool:
    """Whether a parameter and its companions are contiguous real tensors of one size on one device.

    Such a parameter passes every check below and can be updated without views. Kept short: it runs for every parameter
    at every step.
    """
    if type(p) not in (Parameter, Tensor) or p.dtype not in _REAL or not p.is_contiguous():
        return False
    shape, device = p.shape, p.device
    for t in companions:
        if (
            type(t) is not Tensor
            or t.layout != torch.strided
            or t.dtype not in _REAL
            or t.shape != shape
            or t.device != device
            or not t.is_contiguous()
        ):
            return False
    return True


def check_param(p: Tensor, where: str) -> None:
    """TypeError for a dtype that is not trained."""
    if p.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"A parameter of shape {tuple(p.shape)} is {p.dtype}{where}: subulp trains bfloat16, float16, float32, "
            "float64 and complex parameters. Keep it in bfloat16, or freeze it with requires_grad_(False)."
        )


def check_grad(p: Tensor, grad: Tensor, differentiable: bool, where: str) -> None:
    """Raises for a gradient that does not fit its parameter."""
    what = f"The gradient of a parameter of shape {tuple(p.shape)}"
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{what} is sparse ({grad.layout}){where}: sparse gradients are not supported; use sparse=False in the "
            "embedding, or torch.optim.SparseAdam for it."
        )
    if grad.shape != p.shape:
        raise ValueError(f"{what} has shape {tuple(grad.shape)}{where}: they must be equal.")
    if grad.device != p.device:
        raise RuntimeError(f"{what} is on {grad.device}, the parameter on {p.device}{where}: move one to the other.")
    if grad.dtype not in PARAM_DTYPES or grad.is_complex() != p.is_complex():
        raise TypeError(f"{what} is {grad.dtype}, the parameter {p.dtype}{where}: cast the gradient.")
    if is_dtensor(grad) != is_dtensor(p):
        raise TypeError(f"{what} is a {type(grad).__name__}, the parameter a {type(p).__name__}{where}: shard both.")
    if is_dtensor(p) and _mesh(grad) != _mesh(p):
        raise ValueError(
            f"{what} is on the mesh {_mesh(grad)}, the parameter on {_mesh(p)}{where}: use one mesh for both."
        )
    if differentiable and (p.dtype in ROUNDED or is_dtensor(p)):
        raise ValueError(
            f"differentiable=True with a {p.dtype} parameter{where}: rounding has no gradient; use float32."
        )


def check_state(p: Tensor, states: Mapping[State, Any], where: str) -> None:
    """ValueError for a state tensor that does not fit its parameter."""
    for spec, t in states.items():
        if not isinstance(t, Tensor) or t.shape != spec.shape(p.shape):
            found = f"of shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise ValueError(
                f"The state {spec.name!r} of a parameter of shape {tuple(p.shape)} is {found}{where}: load the checkpoint "
                "that belongs to this model (subulp.convert() reads the forms of other optimizers), or delete the state."
            )
        if not (t.is_floating_point() or t.is_complex()):
            raise ValueError(
                f"The state {spec.name!r} of a parameter of shape {tuple(p.shape)} is {t.dtype}{where}: it must be a "
                "floating-point tensor. subulp.convert() reads the integer formats of other optimizers."
            )
        placements = t.placements if is_dtensor(t) else None  # type: ignore[attr-defined]
        if placements != state_placements(p, spec.averaged):
            raise ValueError(
                f"The state {spec.name!r} of a parameter of shape {tuple(p.shape)} has the placements {placements}, "
                f"not {state_placements(p, spec.averaged)}{where}: load it with torch.distributed.checkpoint, or delete it."
            )


def _mesh(t: Any) -> Any:
    return t.device_mesh
