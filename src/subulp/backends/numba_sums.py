"""The native passes of ``sums.py``: one read of the block, no temporaries, a part of the rows for each thread.

``reassoc`` lets LLVM add in vectors. It cannot change a square: a product of two factors has one order.
"""

# mypy: disable-error-code="call-arg, var-annotated, unreachable"

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subulp.backends.numba_cpu import ELEMENTS_PER_THREAD, thread_pool
from subulp.backends.numba_kernel import cached_jit

_OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "nsz"}}
_ELEMENTS = {np.dtype(np.uint16): types.uint16, np.dtype(np.float32): types.float32}

Array = npt.NDArray[Any]


@intrinsic
def _value(typing_context: Any, stored: Any) -> Any:
    """The fp32 of a stored element: of the bits of a bf16 number (uint16), or of an fp32 one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        word = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(stored), emit


def row_and_col_sums(x, row, col):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            value = _value(x[i, j])
            square = np.float64(value * value)
            total += square
            col[j] += square
        row[i] = total


def total_sum(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(x.shape[0]):
        value = _value(x[j])
        total += np.float64(value * value)
    return total


@cache
def _row_and_col(element: Any) -> Any:
    signature = types.void(element[:, ::1], types.float64[::1], types.float64[::1])
    return cached_jit(row_and_col_sums, signature, str(element), **_OPTIONS)


@cache
def _total(element: Any) -> Any:
    return cached_jit(total_sum, types.float64(element[::1]), str(element), **_OPTIONS)


def row_and_col(x: Array) -> tuple[Array, Array]:
    """Sums of squares of each row and each column."""
    kernel = _row_and_col(_ELEMENTS[x.dtype])
    row = np.empty(x.shape[0])
    count = min(torch.get_num_threads(), len(row), -(-x.size // ELEMENTS_PER_THREAD))
    bounds = [len(row) * k // count for k in range(count + 1)]
    cols = np.zeros((count, x.shape[1]))
    parts = [(x[a:b], row[a:b], cols[k]) for k, (a, b) in enumerate(pairwise(bounds))]
    helpers = [thread_pool().submit(kernel, *part) for part in parts[1:]]
    kernel(*parts[0])
    for helper in helpers:
        helper.result()
    return row, cols.sum(0)


def total(x: Array) -> float:
    """The sum of the squares of a flat array."""
    kernel = _total(_ELEMENTS[x.dtype])
    count = min(torch.get_num_threads(), -(-x.size // ELEMENTS_PER_THREAD))
    bounds = [x.size * k // count for k in range(count + 1)]
    helpers = [thread_pool().submit(kernel, x[a:b]) for a, b in pairwise(bounds[1:])]
    result: float = kernel(x[: bounds[1]]) + sum(helper.result() for helper in helpers)
    return result
