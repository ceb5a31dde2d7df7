"""Sums of squares in fp64 along the dimensions of a block: torch's, or on CPUs one native pass."""

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
