"""The native passes of ``sums.py``: one read of the block, no temporaries, a part of the rows for each thread.

``reassoc`` lets LLVM add in vectors. The fp32 products and squares that are added are exact functions, without it. Threads
take whole strips of rows, whose column sums are added in order, so that no sum depends on the number of threads.
"""

# mypy: disable-error-code="call-arg, var-annotated, unreachable"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subulp.backends.forks import wait_for_all
from subulp.backends.numba.kernel import cached_jit
from subulp.backends.numba.launch import ELEMENTS_PER_THREAD, thread_pool
from subulp.formula.factors import deviation, product

STRIP = 64
"""Rows whose column sums are added by one thread."""

PIECE = 1 << 15
"""Elements of a flat array that are added by one thread."""

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


def squared(value):  # type: ignore[no-untyped-def]
    return np.float64(value * value)


def strip_sums(x, row, col):  # type: ignore[no-untyped-def]
    whole = x.shape[0] - x.shape[0] % 4  # by four rows: the column sums go through memory a quarter as often
    for i in range(0, whole, 4):
        t0 = t1 = t2 = t3 = 0.0
        for j in range(x.shape[1]):
            s0, s1 = squared(_value(x[i, j])), squared(_value(x[i + 1, j]))
            s2, s3 = squared(_value(x[i + 2, j])), squared(_value(x[i + 3, j]))
            t0 += s0
            t1 += s1
            t2 += s2
            t3 += s3
            col[j] += (s0 + s1) + (s2 + s3)
        row[i], row[i + 1], row[i + 2], row[i + 3] = t0, t1, t2, t3
    for i in range(whole, x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            square = squared(_value(x[i, j]))
            total += square
            col[j] += square
        row[i] = total


def row_and_col_sums(x, row, cols):  # type: ignore[no-untyped-def]
    for strip in range(cols.shape[0]):
        first, last = strip * STRIP, min((strip + 1) * STRIP, x.shape[0])
        strip_sums(x[first:last], row[first:last], cols[strip])


def weighted_sum(x, r, row, c):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            value = product(_value(x[i, j]), r[i], c[j])
            total += squared(value)
        row[i] = total


def deviation_sums(x, r, row, y, c, factor, cols):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        col = cols[i // STRIP]
        total = 0.0
        for j in range(x.shape[1]):
            value = deviation(_value(x[i, j]), r[i], c[j], _value(y[i, j]), factor)
            square = squared(value)
            total += square
            col[j] += square
        row[i] = total


def total_sums(x, totals):  # type: ignore[no-untyped-def]
    for piece in range(totals.shape[0]):
        total = 0.0
        for j in range(piece * PIECE, min((piece + 1) * PIECE, x.shape[0])):
            value = _value(x[j])
            total += squared(value)
        totals[piece] = total


@cache
def _row_and_col(element: Any) -> Any:
    signature = types.void(element[:, ::1], types.float64[::1], types.float64[:, ::1])
    return cached_jit(row_and_col_sums, signature, str(element), exact=(squared,), inner=(strip_sums,), **_OPTIONS)


@cache
def _weighted(element: Any) -> Any:
    vector = types.float32[::1]
    signature = types.void(element[:, ::1], vector, types.float64[::1], vector)
    return cached_jit(weighted_sum, signature, str(element), exact=(product, squared), **_OPTIONS)


@cache
def _deviation(element: Any, other: Any) -> Any:
    vector, sums = types.float32[::1], types.float64[::1]
    signature = types.void(element[:, ::1], vector, sums, other[:, ::1], vector, types.float32, types.float64[:, ::1])
    return cached_jit(deviation_sums, signature, f"{element} {other}", exact=(product, deviation, squared), **_OPTIONS)


@cache
def _total(element: Any) -> Any:
    return cached_jit(
        total_sums, types.void(element[::1], types.float64[::1]), str(element), exact=(squared,), **_OPTIONS
    )


def row_and_col(x: Array) -> tuple[Array, Array]:
    """Sums of squares of each row and each column."""
    return _by_rows(_row_and_col(_ELEMENTS[x.dtype]), [x], [])


def weighted(x: Array, r: Array, c: Array) -> float:
    """The sum of the squares of ``r * c * x``."""
    row = np.empty(len(x))
    _run(_weighted(_ELEMENTS[x.dtype]), [(x[a:b], r[a:b], row[a:b], c) for a, b in _parts(x)])
    return float(row.sum())


def deviation_of(x: Array, r: Array, c: Array, y: Array, factor: float) -> tuple[Array, Array]:
    """Sums of squares of each row and each column of ``r * c * x - factor * y``."""
    return _by_rows(_deviation(_ELEMENTS[x.dtype], _ELEMENTS[y.dtype]), [x, r], [c, np.float32(factor)], [y])


def _parts(x: Array, unit: int = 1) -> Iterator[tuple[int, int]]:
    """The rows of each thread, in whole units."""
    units = -(-len(x) // unit)
    count = min(torch.get_num_threads(), units, -(-x.size // ELEMENTS_PER_THREAD))
    return pairwise(min(units * k // count * unit, len(x)) for k in range(count + 1))


def _run(kernel: Any, parts: list[tuple[Any, ...]]) -> list[Any]:
    """What the kernel returns for each part, the first one in this thread."""
    helpers = [thread_pool().submit(kernel, *part) for part in parts[1:]]
    try:
        first = kernel(*parts[0])
    finally:
        others = wait_for_all(helpers)
    return [first, *others]


def _by_rows(kernel: Any, by_row: list[Array], shared: list[Any], after: Sequence[Array] = ()) -> tuple[Array, Array]:
    """Runs ``kernel(*by_row, row sums, *after, *shared, column sums of strips)`` on a part of the rows in each thread."""
    x = by_row[0]
    row = np.empty(x.shape[0])
    cols = np.zeros((-(-len(x) // STRIP), x.shape[1]))
    _run(
        kernel,
        [
            (*(t[a:b] for t in by_row), row[a:b], *(t[a:b] for t in after), *shared, cols[a // STRIP : -(-b // STRIP)])
            for a, b in _parts(x, STRIP)
        ],
    )
    return row, cols.sum(0)


def total(x: Array) -> float:
    """The sum of the squares of a flat array."""
    totals = np.empty(-(-len(x) // PIECE))
    parts = [(x[a:b], totals[a // PIECE : -(-b // PIECE)]) for a, b in _parts(x, PIECE)]
    _run(_total(_ELEMENTS[x.dtype]), parts)
    return float(totals.sum())
