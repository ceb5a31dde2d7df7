"""Flat, storage-order views of the tensors of one update, whatever their strides, sharding or complexness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subulp.numerics.layout import Layout, is_dense, layout_of
from subulp.torch_internals import global_block, local_tensor


@dataclass
class Views:
    """One-dimensional views in a common storage order: ``written`` (the target first), then ``reads``."""

    written: list[Tensor]
    reads: list[Tensor]
    layout: Layout
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(original, working copy) of written tensors that could not be viewed."""

    def finish(self) -> None:
        """Copies the working copies back."""
        for original, copy in self.copies:
            original.copy_(copy)


Block = tuple[tuple[int, ...], tuple[int, ...]]


def flat_views(written: Sequence[Tensor], reads: Sequence[Tensor], base: int = 0, block: Block | None = None) -> Views:
    """Views for an update of ``written[0]`` and its companions of the same shape.

    The storage order is that of the target if it is dense, else row-major on a working copy. A companion in another
    order is copied into the target's, and back if it is written. ``base`` is added to every global element index.
    ``block`` is the shape of the whole and the target's offset in it, for a target that does not know them itself.
    """
    target = written[0]
    shape, offset = block or global_block(target)
    locals_written = [local_tensor(t) for t in written]
    locals_reads = [local_tensor(t) for t in reads]
    if target.is_complex():
        locals_written = [torch.view_as_real(t) for t in locals_written]
        locals_reads = [torch.view_as_real(t) for t in locals_reads]
        shape, offset = (*shape, 2), (*offset, 0)
    first = locals_written[0]
    like = first if is_dense(first) else torch.empty(first.shape, dtype=first.dtype, device=first.device)
    layout = layout_of(tuple(like.shape), like.stride(), shape, offset, base)
    views = Views([], [], layout)
    for t in locals_written:
        view, copy = _flat(t, like)
        views.written.append(view)
        if copy is not None:
            views.copies.append((t, copy))
    views.reads = [_flat(t, like)[0] for t in locals_reads]
    return views


def _flat(t: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    copy = None
    if not _same_order(t, like):
        copy = torch.empty_strided(like.shape, like.stride(), dtype=t.dtype, device=t.device).copy_(t)
        t = copy
    return (t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))), copy


def _same_order(t: Tensor, like: Tensor) -> bool:
    if t.is_contiguous() and like.is_contiguous():
        return True
    return all(
        a == b for size, a, b in zip(like.shape, t.stride(), like.stride(), strict=True) if size != 1
    ) and is_dense(t)
