"""Sums of squares in fp64 along the dimensions of a block, and its products: torch's, or on CPUs one native pass."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_NATIVE = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


def square_sums(block: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the squares over the last and over the last but one dimension, each square rounded to fp32, fp64 sums."""
    if block.dim() == 2 and _is_native(block):
        native: Any = _kernels()
        row, col = native.row_and_col(_as_array(block))
        return torch.from_numpy(row), torch.from_numpy(col)
    squares = _squares(block)
    return squares.sum(-1, dtype=torch.float64), squares.sum(-2, dtype=torch.float64)


def weighted_square_sums(
    block: Tensor, by_row: Tensor, by_col: Tensor, other: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`square_sums` of ``by_row * by_col * block``, minus ``factor * other`` if given, all in fp32.

    Shapes: ``by_row`` (..., rows, 1), ``by_col`` (..., 1, columns), ``factor`` 0-d.
    """
    tensors = [block] if other is None else [block, other]
    if block.dim() == 2 and by_row.dtype == torch.float32 and all(map(_is_native, tensors)):
        native: Any = _kernels()
        scale = None if factor is None else float(factor)
        arrays = [_as_array(t) for t in (block, by_row.reshape(-1), by_col.reshape(-1))]
        row, col = native.weighted(*arrays, None if other is None else _as_array(other), scale)
        return torch.from_numpy(row), torch.from_numpy(col)
    values = by_row * by_col * block.to(by_row.dtype)
    if other is not None and factor is not None:
        values = values - other.to(by_row.dtype) * factor
    return square_sums(values)


def weighted_block(block: Tensor, by_row: Tensor, by_col: Tensor, out: Tensor) -> Tensor:
    """``by_row * by_col * block`` in the dtype of ``out``, the left product first; shapes as above. Returns ``out``."""
    if block.dim() == 2 and out.dtype == torch.float32 and _is_native(block) and _is_native(out):
        native: Any = _kernels()
        native.weigh_into(*(_as_array(t) for t in (block, by_row.reshape(-1), by_col.reshape(-1), out)))
        return out
    torch.mul(by_row, by_col, out=out)
    return out.mul_(block.to(out.dtype))


def square_sum(block: Tensor) -> Tensor:
    """The sum of all squares: fp64, 0-d."""
    if _is_native(block):
        native: Any = _kernels()
        return torch.tensor(native.total(_as_array(block.view(-1))), dtype=torch.float64)
    return _squares(block).sum(dtype=torch.float64)


def _squares(block: Tensor) -> Tensor:
    return block.to(torch.promote_types(block.dtype, torch.float32)).square()


def _is_native(block: Tensor) -> bool:
    return block.is_cpu and block.dtype in _NATIVE and block.is_contiguous() and block.numel() > 0 and _has_numba()


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _kernels() -> Any:
    return importlib.import_module("subulp.backends.numba_sums")


def _as_array(block: Tensor) -> Any:
    return block.detach().view(_NATIVE[block.dtype]).numpy()
