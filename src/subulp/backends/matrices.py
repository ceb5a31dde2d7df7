"""What a backend receives for sums, and for updates with factors by row and column: tensors as stacks of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Operand = float | Tensor
"""A scalar: the same for all tensors, or one for each (fp64, shape (tensors,))."""


class Matrices:
    """Contiguous tensors of equal device and dtypes, by name of their column.

    A tensor of shape (..., rows, columns) is a stack of matrices, one of a single dimension has one row. *Packed* vectors
    have a number for each row (or column) of all matrices of the first tensor, then of the next.
    """

    def __init__(self, columns: Mapping[str, Sequence[Tensor]]) -> None:
        self.columns = columns
        first: Sequence[Tensor] = next(iter(columns.values()))
        self.device = first[0].device
        self.shapes = np.array([stack_of(t.shape) for t in first], dtype=np.int64)
        """(tensors, 3): matrices, rows, columns."""

    def __len__(self) -> int:
        return len(self.shapes)

    def dtypes(self, names: Sequence[str]) -> tuple[torch.dtype, ...]:
        return tuple(self.columns[name][0].dtype for name in names)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Elements of each tensor."""
        result: npt.NDArray[np.int64] = self.shapes.prod(axis=1)
        return result

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """Rows of each tensor, over its stack."""
        result: npt.NDArray[np.int64] = self.shapes[:, 0] * self.shapes[:, 1]
        return result

    @cached_property
    def cols(self) -> npt.NDArray[np.int64]:
        """Columns of each tensor, over its stack."""
        result: npt.NDArray[np.int64] = self.shapes[:, 0] * self.shapes[:, 2]
        return result


def stack_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Matrices, rows and columns of a tensor."""
    if len(shape) < 2:
        return 1, 1, prod(shape)
    return prod(shape[:-2]), shape[-2], shape[-1]


def starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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
