"""Sums of squares in fp64 along the dimensions of a block: torch's, or on CPUs one native pass.

On a CPU no sum depends on the number of threads: each is made of partial sums over fixed pieces, added in order.
``native=False`` keeps to torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from subulp.formula.factors import deviation, product

PIECE = 1 << 14
"""Elements that are summed by one thread: below torch's own limit (32768) for splitting a sum."""

_NATIVE = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


def square_sums(block: Tensor, native: bool = True) -> tuple[Tensor, Tensor]:
    """Sums of the squares over the last and over the last but one dimension, each square rounded to fp32, fp64 sums."""
    if native and block.dim() == 2 and _is_native(block):
        kernels: Any = _kernels()
        row, col = kernels.row_and_col(_as_array(block))
        return torch.from_numpy(row), torch.from_numpy(col)
    squares = _squares(block)
    return _sum_along(squares, -1), _sum_along(squares, -2)


def weighted_square_sum(block: Tensor, by_row: Tensor, by_col: Tensor, native: bool = True) -> Tensor:
    """The sum (fp64, 0-d) of the squares of ``by_row * by_col * block``, products and squares in fp32.

    Shapes: ``by_row`` (..., rows, 1), ``by_col`` (..., 1, columns).
    """
    if native and block.dim() == 2 and by_row.dtype == torch.float32 and _is_native(block):
        kernels: Any = _kernels()
        total = kernels.weighted(*map(_as_array, (block, by_row.reshape(-1), by_col.reshape(-1))))
        return torch.tensor(total, dtype=torch.float64)
    return square_sum(product(block.to(by_row.dtype), by_row, by_col), native)


def deviation_square_sums(
    block: Tensor, by_row: Tensor, by_col: Tensor, other: Tensor, factor: Tensor, native: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`square_sums` of ``by_row * by_col * block - factor * other``, all in fp32. Shapes as above; ``factor`` 0-d."""
    if native and block.dim() == 2 and by_row.dtype == torch.float32 and _is_native(block) and _is_native(other):
        kernels: Any = _kernels()
        arrays = map(_as_array, (block, by_row.reshape(-1), by_col.reshape(-1), other))
        row, col = kernels.deviation_of(*arrays, float(factor))
        return torch.from_numpy(row), torch.from_numpy(col)
    dtype = by_row.dtype
    return square_sums(deviation(block.to(dtype), by_row, by_col, other.to(dtype), factor), native)


def square_sum(block: Tensor, native: bool = True) -> Tensor:
    """The sum of all squares: fp64, 0-d."""
    if native and _is_native(block):
        kernels: Any = _kernels()
        return torch.tensor(kernels.total(_as_array(block.view(-1))), dtype=torch.float64)
    return total_of(_squares(block))


def total_of(t: Tensor) -> Tensor:
    """The sum of all elements: fp64, 0-d."""
    return _sum_along(t.reshape(-1), -1)


def _sum_along(t: Tensor, dim: int) -> Tensor:
    """``t.sum(dim)`` in fp64, on a CPU in pieces that torch does not split between threads."""
    size = t.shape[dim]
    if not t.is_cpu or size <= PIECE:
        return t.sum(dim, dtype=torch.float64)
    whole = size // PIECE * PIECE
    pieces = t.narrow(dim, 0, whole).unflatten(dim, (-1, PIECE)).sum(dim, dtype=torch.float64)
    return _sum_along(pieces, dim) + t.narrow(dim, whole, size - whole).sum(dim, dtype=torch.float64)


def needs_no_temporaries(t: Tensor) -> bool:
    """Whether these sums over a tensor with two dimensions are one native pass."""
    return _is_native(t)


def _squares(block: Tensor) -> Tensor:
    return block.to(torch.promote_types(block.dtype, torch.float32)).square()


def _is_native(block: Tensor) -> bool:
    return block.is_cpu and block.dtype in _NATIVE and block.is_contiguous() and block.numel() > 0 and _has_numba()


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _kernels() -> Any:
    return importlib.import_module("subulp.backends.numba.sums")


def _as_array(block: Tensor) -> Any:
    return block.detach().view(_NATIVE[block.dtype]).numpy()
