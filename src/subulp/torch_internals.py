"""Every use of torch that torch does not promise to keep; tests/test_torch_internals.py fails when one of them changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

_F = TypeVar("_F", bound=Callable[..., Any])


def dtensor_class() -> Any:
    """``DTensor`` if the process has loaded it, else None: importing it costs a second that most scripts never need."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_dtensor(t: Tensor) -> bool:
    """Whether ``t`` is a sharded tensor."""
    cls = dtensor_class()
    return cls is not None and isinstance(t, cls)


def local_tensor(t: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def global_block(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The global shape, and the offset in it of this process's block."""
    if not is_dtensor(t):
        return tuple(t.shape), (0,) * t.dim()
    sharded: Any = t
    return tuple(t.shape), block_of(t.shape, sharded.device_mesh, sharded.placements)[1]


def block_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this process's block of a tensor of this global shape."""
    return _block_at(tuple(mesh.get_coordinate()), tuple(shape), mesh, tuple(placements))


@lru_cache(maxsize=65536)  # torch makes a tensor of all row numbers each time
def _block_at(
    coordinate: tuple[int, ...], shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local_shape), tuple(offset)


def opaque_to_compile(function: _F) -> _F:
    """The function as one opaque call under ``torch.compile``; unlike ``torch.compiler.disable`` loads no compiler now."""
    return _disable_dynamo(function)  # type: ignore[return-value]


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tells autograd that these tensors have changed, so that a backward pass which needs their old values raises.

    What writes through addresses does not go through torch, which counts the versions of a tensor otherwise.
    """
    increment_version(list(tensors))
