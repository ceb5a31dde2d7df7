"""States and sums of parameters that are sharded over processes (DTensors), and of any other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from subulp.torch_internals import is_dtensor


def zeros_for(p: Tensor, averaged: int | None, dtype: torch.dtype) -> Tensor:
    """A zero state for ``p``, sharded as ``p`` is; without its dimension ``averaged`` if that is not None."""
    if averaged is None:
        return torch.zeros_like(p, dtype=dtype)
    gone = p.dim() + averaged
    shape = (*p.shape[:gone], *p.shape[gone + 1 :])
    if not is_dtensor(p):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import Replicate, Shard, zeros

    sharded: Any = p
    placements = [
        placement
        if not placement.is_shard() or placement.dim < gone
        # Each process of a sharded dimension that is averaged away keeps the whole average.
        else Replicate()
        if placement.dim == gone
        else Shard(placement.dim - 1)
        for placement in sharded.placements
    ]
    result: Tensor = zeros(shape, dtype=dtype, device_mesh=sharded.device_mesh, placements=placements)
    return result


def sum_over_shards(t: Tensor, p: Tensor, dims: Collection[int] | None = None) -> Tensor:
    """``t``, summed in place over the processes that hold different parts of ``p``.

    ``dims``: only over those whose parts differ along one of these (non-negative) dimensions.
    """
    if is_dtensor(p):
        import torch.distributed as dist

        sharded: Any = p
        for i, placement in enumerate(sharded.placements):
            if placement.is_shard() and (dims is None or placement.dim in dims):
                dist.all_reduce(t, group=sharded.device_mesh.get_group(i))
    return t
