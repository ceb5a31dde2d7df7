"""What a backend receives: the tensors of many parameters whose update is the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.numerics.layout import Layout
from subulp.numerics.views import Views, flat_views
from subulp.torch_internals import mark_written


@dataclass
class Bucket:
    """Tensors of equal device and dtypes, by column: ``written[c][i]`` is column c (the target is 0) of parameter i.

    Every tensor is contiguous or a flat view; elements are in storage order.
    """

    written: list[list[Tensor]]
    reads: list[list[Tensor]]
    layouts: list[Layout | None]
    """None: contiguous and whole, the storage position is the global index."""
    streams: Sequence[int]
    steps: Any = None
    """The step of each parameter, int64: an array, or a tensor on the device if the backend can read it there."""
    scalars: Any = None
    """One row for each distinct set of scalars, fp64, shape (rows, rule.scalars); an array or tensor, as ``steps``."""
    rows: Any = None
    """The row of each parameter, int64."""
    views: list[Views] = field(default_factory=list)
    """Views whose working copies are to be copied back after the update."""
    members: Sequence[int] = ()
    """Which of the caller's parameters these are."""

    def fill(self, steps: npt.NDArray[np.int64], scalars: npt.NDArray[np.float64], rows: npt.NDArray[np.int64]) -> None:
        """Takes its members' part of the steps and rows of all the caller's parameters."""
        self.steps, self.scalars, self.rows = steps[self.members], scalars, rows[self.members]

    def finish(self) -> None:
        """What follows the update: working copies go back, and autograd is told what has been written."""
        mark_written(t for column in self.written for t in column)
        for views in self.views:
            views.finish()

    @property
    def device(self) -> torch.device:
        return self.written[0][0].device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the columns, written ones first."""
        return tuple(column[0].dtype for column in (*self.written, *self.reads))


def single(views: Views, stream: int, step: int, scalars: Sequence[float]) -> Bucket:
    """A bucket of one parameter."""
    return Bucket(
        [[t] for t in views.written],
        [[t] for t in views.reads],
        [views.layout],
        [stream],
        np.array([step], dtype=np.int64),
        np.array([scalars], dtype=np.float64),
        np.zeros(1, dtype=np.int64),
        [views],
    )


def make_buckets(
    written: Sequence[Sequence[Tensor]],
    reads: Sequence[Sequence[Tensor]],
    simple: Sequence[bool],
    streams: Sequence[int],
) -> list[Bucket]:
    """The parameters, sorted into buckets of equal device and dtypes; empty ones are left out. Steps are yet to be filled.

    ``simple`` parameters (contiguous, unsharded, real, with companions alike) go in as they are, others as views.
    """
    columns = [list(column) for column in (*written, *reads)]
    layouts: list[Layout | None] = [None] * len(simple)
    views: dict[int, Views] = {}
    for i, plain in enumerate(simple):
        if not plain:
            views[i] = flat_views([c[i] for c in columns[: len(written)]], [c[i] for c in columns[len(written) :]])
            layouts[i] = views[i].layout
            for column, t in zip(columns, (*views[i].written, *views[i].reads), strict=True):
                column[i] = t
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(zip(*([t.dtype for t in column] for column in columns), strict=True)):
        target = columns[0][i]
        if target.numel() > 0 and not target.is_meta:  # on the meta device there is nothing to compute
            members.setdefault((target.device, key), []).append(i)
    buckets = []
    for chosen in members.values():
        picked = [[column[i] for i in chosen] for column in columns]
        buckets.append(
            Bucket(
                picked[: len(written)],
                picked[len(written) :],
                [layouts[i] for i in chosen],
                [streams[i] for i in chosen],
                views=[views[i] for i in chosen if i in views],
                members=chosen,
            )
        )
    return buckets
