"""What a backend receives for sums, and for updates with factors by row and column: tensors as stacks of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.numerics.layout import Layout

Table = npt.NDArray[np.int64]

Operand = float | Tensor
"""A scalar: the same for all tensors, or one for each (fp64, shape (tensors,))."""


class Stacks:
    """The shapes of tensors as stacks of matrices, and what follows from them.

    A tensor of shape (..., rows, columns) is a stack of matrices, one of a single dimension has one row. *Packed* vectors
    have a number for each row (or column) of all matrices of the first tensor, then of the next.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], layouts: Sequence[Layout] = (), streams: Sequence[int] = ()
    ) -> None:
        self.layouts = layouts
        self.streams = streams
        """Of the noise, one for each tensor; sums need none."""
        self.memo: dict[str, Any] = {}
        """What a backend makes of the shapes once."""
        self.shapes = np.array([stack_of(shape) for shape in shapes], dtype=np.int64).reshape(-1, 3)
        """(tensors, 3): matrices, rows, columns."""
        self.key = self.shapes.tobytes()
        """Equal for equal shapes."""
        self.sizes: Table = self.shapes.prod(axis=1)
        """Elements of each tensor."""
        self.rows: Table = self.shapes[:, 0] * self.shapes[:, 1]
        """Rows of each tensor, over its stack."""
        self.cols: Table = self.shapes[:, 0] * self.shapes[:, 2]
        """Columns of each tensor, over its stack."""
        self.row_starts = starts(self.rows)
        self.col_starts = starts(self.cols)


class Matrices:
    """Contiguous tensors of equal device and dtypes, by name of their column, and their shapes as :class:`Stacks`."""

    def __init__(self, columns: Mapping[str, Sequence[Tensor]], stacks: Stacks | None = None) -> None:
        self.columns = columns
        first: Sequence[Tensor] = next(iter(columns.values()))
        self.device = first[0].device
        self.stacks = stacks or Stacks([t.shape for t in first])

    def __len__(self) -> int:
        return len(self.stacks.shapes)

    def dtypes(self, names: Sequence[str]) -> tuple[torch.dtype, ...]:
        return tuple(self.columns[name][0].dtype for name in names)


def stack_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Matrices, rows and columns of a tensor."""
    if len(shape) < 2:
        return 1, 1, prod(shape)
    return prod(shape[:-2]), shape[-2], shape[-1]


def starts(counts: Table) -> Table:
    """Where each segment of these lengths begins, and last the end."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def scalar_table(names: Sequence[str], values: Mapping[str, Operand], count: int) -> npt.NDArray[np.float64]:
    """On the host: a row of scalars for each tensor."""
    table = np.empty((count, len(names)))
    for c, name in enumerate(names):
        value = values[name]
        table[:, c] = value.numpy() if isinstance(value, Tensor) else value
    return table
