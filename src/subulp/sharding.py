"""States and sums of parameters that are sharded over processes (DTensors), and of any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subulp.formula.rule import State
from subulp.torch_internals import block_of, is_dtensor, local_tensor


def zeros_for(p: Tensor, spec: State, dtype: torch.dtype) -> Tensor:
    """A zero state for ``p``, sharded as ``p`` is."""
    if spec.every > 1:
        return torch.zeros(spec.shape(p.shape), dtype=dtype, device=p.device)
    if spec.averaged is None:
        return torch.zeros_like(p, dtype=dtype)
    gone = p.dim() + spec.averaged
    shape = (*p.shape[:gone], *p.shape[gone + 1 :])
    if not is_dtensor(p):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    return _part(torch.zeros((), dtype=dtype, device=p.device).expand(shape), p, spec.averaged)


def counter_device(p: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where a step counter lives: on the host or, with ``capturable``, with its parameter where fp64 exists (not on MPS)."""
    return p.device if group["capturable"] and p.device.type != "mps" else torch.device("cpu")


def like_state(t: Any, p: Tensor, spec: State) -> Any:
    """A whole state tensor of a sharded parameter as one that is sharded alike; nothing is sent. Any other value itself."""
    whole = isinstance(t, Tensor) and not is_dtensor(t) and t.shape == spec.shape(p.shape)
    return _part(t, p, spec.averaged) if whole and is_dtensor(p) else t


def whole_of(local: Tensor, p: Tensor) -> Tensor:
    """The whole of a tensor that is sharded as ``p``, from this process's part of it: a collective operation."""
    if not is_dtensor(p):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = p
    stride = torch.empty(p.shape, device="meta").stride()
    spread = DTensor.from_local(local, sharded.device_mesh, sharded.placements, shape=p.shape, stride=stride)
    result: Tensor = spread.full_tensor()
    return result


def part_of(whole: Tensor, p: Tensor) -> Tensor:
    """This process's part of a tensor of ``p``'s global shape, if it were sharded as ``p``."""
    return local_tensor(_part(whole, p, None)) if is_dtensor(p) else whole


def state_placements(p: Tensor, averaged: int | None) -> tuple[Any, ...] | None:
    """The placements of a state of ``p``; None if it is not sharded."""
    if not is_dtensor(p):
        return None
    sharded: Any = p
    if averaged is None:
        return tuple(sharded.placements)
    return tuple(_without(placement, p.dim(), averaged) for placement in sharded.placements)


def _part(t: Tensor, p: Any, averaged: int | None) -> Tensor:
    from torch.distributed.tensor import DTensor

    placements = state_placements(p, averaged) or ()
    shape, offset = block_of(t.shape, p.device_mesh, placements)
    local = t[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].contiguous()
    stride = torch.empty(t.shape, device="meta").stride()
    result: Tensor = DTensor.from_local(local, p.device_mesh, placements, shape=t.shape, stride=stride)
    return result


def _without(placement: Any, dims: int, averaged: int) -> Any:
    """The placement of a state from that of its parameter, which has ``dims`` dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    dim = sharded_dim(placement)
    if dim is None or dim < dims + averaged:
        return placement
    # Each process of a sharded dimension that is averaged away keeps the whole average.
    if dim == dims + averaged:
        return Replicate()
    if isinstance(placement, Shard):
        return Shard(dim - 1)
    return type(placement)(dim - 1, split_factor=placement.split_factor)


def sharded_dim(placement: Any) -> int | None:
    """The dimension that a placement shards; None if it shards none.

    ``placement.is_shard()`` is False for the strided shards that FSDP puts over those of tensor parallelism.
    """
    return getattr(placement, "dim", None)


def placed_like(grads: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients with the placements of their parameters.

    Where a process has worked on a part of the data, tensor parallelism leaves the sum over processes to us (``Partial``).
    """
    return [
        grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        if is_dtensor(grad) and grad.placements != p.placements  # type: ignore[attr-defined]
        else grad
        for grad, p in zip(grads, params, strict=True)
    ]


def is_zero(t: Tensor) -> bool:
    """Whether all elements are zero, those of other processes included."""
    return not bool(sum_over_shards(local_tensor(t).any().to(torch.int32), t))


def sum_over_shards(t: Tensor, p: Tensor, dims: Collection[int] | None = None) -> Tensor:
    """``t``, summed in place over the processes that hold different parts of ``p``.

    ``dims``: only over those whose parts differ along one of these (non-negative) dimensions.
    """
    if is_dtensor(p):
        import torch.distributed as dist

        sharded: Any = p
        for i, placement in enumerate(sharded.placements):
            dim = sharded_dim(placement)
            if dim is not None and (dims is None or dim in dims):
                dist.all_reduce(t, group=sharded.device_mesh.get_group(i))
    return t
