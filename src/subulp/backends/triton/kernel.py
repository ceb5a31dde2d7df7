"""The one Triton kernel, specialised by formula and formats, and the binding of formulas to Triton.

A program updates one chunk of one tensor. The *fast* part of a chunk is walked in pairs of elements, with 128-bit
accesses. The rest (the last few elements, a view that is not 16-byte aligned, an odd first index, a strided layout) is
walked element by element and gets the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005  Triton knows no starred displays

from __future__ import annotations

import types as python_types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl

from subulp.backends.triton.lanes import (
    FORMATS,
    code_of,
    element_address,
    load_pairs,
    load_singles,
    pair_draws,
    single_draws,
    slot_keys,
    store_pairs,
    store_singles,
    value_of,
)
from subulp.backends.triton.tables import CHUNK_FIELDS, ROW_FIELDS, TILE, VECTOR
from subulp.formula import ops
from subulp.formula.rule import Rule, slots

THREADS = 128
"""Threads of a program: a tile is four pairs for each."""

PAIRS = TILE // 2
SINGLES = 256
"""Elements in a tile of the element by element part."""

_DIGIT_LIMIT = tl.constexpr(1 << 30)
_CHUNK_FIELDS = tl.constexpr(CHUNK_FIELDS)
_ROW_FIELDS = tl.constexpr(ROW_FIELDS)
_VECTOR_PAIRS = tl.constexpr(VECTOR // 2)


@triton.jit
def _global_index(row, start, j, COLUMNS: tl.constexpr, DIMS: tl.constexpr):
    """Global index (int64) of storage position ``start + j``, as ``subulp.numerics.layout.Layout``.

    The digits of ``start`` are 64-bit scalars; per element only carries are divided, in 32 bits.
    """
    layout = row + COLUMNS + _ROW_FIELDS
    index = tl.load(row + COLUMNS)
    rest = start
    carry = j
    for i in tl.static_range(DIMS):
        stride = tl.load(layout + 2 * DIMS - 1 - i)
        if i == DIMS - 1:
            digit = rest + carry
        else:
            size = tl.load(layout + DIMS - 1 - i)
            outer = rest // size
            first = rest - outer * size
            # A carry is smaller than a chunk, so cutting both of these at the limit changes no result.
            to_end = tl.minimum(size - first, _DIGIT_LIMIT).to(tl.int32)
            period = tl.minimum(size, _DIGIT_LIMIT).to(tl.uint32)
            beyond = (carry - to_end).to(tl.uint32)
            wraps = tl.where(carry < to_end, 0, 1 + (beyond // period).to(tl.int32))
            digit = first + carry - wraps * size
            rest = outer
            carry = wraps
        index = index + digit * stride
    return index


@triton.jit
def _new_values(
    codes,
    scalars,
    factor,
    FORMULA: tl.constexpr,
    FORMATS: tl.constexpr,
    WRITTEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The formula on the elements of these codes, those of written tensors first."""
    arguments = (value_of(codes[0], FORMATS & 3),)
    for c in tl.static_range(WRITTEN, COLUMNS):
        value = value_of(codes[c], (FORMATS >> 2 * c) & 3)
        # Not even a factor of 1.0 for free: it would change the sign of a NaN that is only copied.
        if SCALED and c == WRITTEN:
            value = value * factor
        arguments = arguments + (value,)
    for c in tl.static_range(1, WRITTEN):
        arguments = arguments + (value_of(codes[c], (FORMATS >> 2 * c) & 3),)
    arguments = arguments + scalars
    return FORMULA(*arguments)


@triton.jit(
    do_not_specialize=["table", "chunks", "steps", "scalar_table", "found_inf", "grad_scale", "read_factor"],
    do_not_specialize_on_alignment=["table", "chunks", "steps", "scalar_table", "found_inf", "grad_scale"],
)
def update(
    table,
    chunks,
    steps,
    scalar_table,
    found_inf,
    grad_scale,
    read_factor,
    FORMULA: tl.constexpr,
    FORMATS: tl.constexpr,
    WRITTEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    DIMS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RAW: tl.constexpr,
    KEEPS_NONFINITE: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    PAIRS: tl.constexpr,
    SINGLES: tl.constexpr,
):
    """Updates one chunk.

    Shapes: ``table`` int64 (tensors, COLUMNS + 4 + 2 * DIMS) and ``chunks`` int64 (programs, 6), see tables.py;
    ``steps`` int64 (lines,); ``scalar_table`` fp32 (lines, SCALARS); ``found_inf`` and ``grad_scale`` fp32 of one
    element, read if the flags say so. FORMATS has two bits for each column, STOCHASTIC one for each written one, the first
    column's lowest.
    """
    chunk = chunks + tl.program_id(0).to(tl.int64) * _CHUNK_FIELDS
    row = table + tl.load(chunk) * (COLUMNS + _ROW_FIELDS + 2 * DIMS)
    start = tl.load(chunk + 1)
    count = tl.load(chunk + 2).to(tl.int32)
    fast = tl.load(chunk + 3).to(tl.int32)
    first_high = tl.load(chunk + 4)
    last_high = tl.load(chunk + 5)
    if HAS_FOUND_INF:
        skip = tl.load(found_inf) != 0
        count = tl.where(skip, 0, count)
        fast = tl.where(skip, 0, fast)
    factor = read_factor
    if HAS_GRAD_SCALE:
        factor = factor * tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(grad_scale))

    stream = tl.load(row + COLUMNS + 1)
    seed = tl.load(row + COLUMNS + 2)
    line = tl.load(row + COLUMNS + 3)
    step = tl.load(steps + line)
    scalars = ()
    for s in tl.static_range(SCALARS):
        scalars = scalars + (tl.load(scalar_table + line * SCALARS + s),)
    keys = ()
    for slot in tl.static_range(WRITTEN):
        keys = keys + slot_keys(seed, stream, step, slot, (FORMATS >> 2 * slot) & 3, first_high)
    addresses = ()
    for c in tl.static_range(COLUMNS):
        addresses = addresses + (element_address(tl.load(row + c), start, (FORMATS >> 2 * c) & 3),)

    first_index = tl.load(row + COLUMNS) + start
    pairs = tl.multiple_of(fast // 2, _VECTOR_PAIRS)
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        inside = pair < pairs
        even = ()
        odd = ()
        for c in tl.static_range(COLUMNS):
            code0, code1 = load_pairs(addresses[c], pair, inside, (FORMATS >> 2 * c) & 3)
            even = even + (code0,)
            odd = odd + (code1,)
        new_even = _new_values(even, scalars, factor, FORMULA, FORMATS, WRITTEN, COLUMNS, SCALED)
        new_odd = _new_values(odd, scalars, factor, FORMULA, FORMATS, WRITTEN, COLUMNS, SCALED)
        for slot in tl.static_range(WRITTEN):
            draw0, draw1 = pair_draws(first_index, pair, keys[2 * slot], keys[2 * slot + 1], (FORMATS >> 2 * slot) & 3)
            code0 = code_of(
                new_even[slot],
                even[slot],
                draw0,
                (FORMATS >> 2 * slot) & 3,
                (STOCHASTIC >> slot) & 1,
                RAW,
                KEEPS_NONFINITE and slot == 0,
            )
            code1 = code_of(
                new_odd[slot],
                odd[slot],
                draw1,
                (FORMATS >> 2 * slot) & 3,
                (STOCHASTIC >> slot) & 1,
                RAW,
                KEEPS_NONFINITE and slot == 0,
            )
            store_pairs(addresses[slot], pair, inside, code0, code1, (FORMATS >> 2 * slot) & 3)

    for first in range(fast, count, SINGLES):
        j = first + tl.arange(0, SINGLES)
        inside = j < count
        codes = ()
        for c in tl.static_range(COLUMNS):
            codes = codes + (load_singles(addresses[c], j, inside, (FORMATS >> 2 * c) & 3),)
        new = _new_values(codes, scalars, factor, FORMULA, FORMATS, WRITTEN, COLUMNS, SCALED)
        index = _global_index(row, start, j, COLUMNS, DIMS)
        for slot in tl.static_range(WRITTEN):
            draw = single_draws(
                index,
                keys[2 * slot],
                keys[2 * slot + 1],
                seed,
                stream,
                step,
                first_high,
                last_high,
                slot,
                (FORMATS >> 2 * slot) & 3,
            )
            code = code_of(
                new[slot],
                codes[slot],
                draw,
                (FORMATS >> 2 * slot) & 3,
                (STOCHASTIC >> slot) & 1,
                RAW,
                KEEPS_NONFINITE and slot == 0,
            )
            store_singles(addresses[slot], j, inside, code, (FORMATS >> 2 * slot) & 3)


# The named functions of formulas


@triton.jit
def _div(a, b):
    return tl.div_rn(a, b)


@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def _absolute(x):
    return tl.abs(x)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


BINDINGS: dict[Any, Any] = {
    ops.div: _div,
    ops.sqrt: _sqrt,
    ops.absolute: _absolute,
    ops.where: _where,
    ops.maximum: _maximum,
    ops.sign: _sign,
}


@cache
def bind(formula: Callable[..., Any]) -> Any:
    """The same code under ``triton.jit``, its named functions and helper formulas replaced by their Triton twins."""
    if formula in BINDINGS:
        return BINDINGS[formula]
    names = {
        name: bind(value)
        for name in formula.__code__.co_names
        if isinstance(value := formula.__globals__.get(name), python_types.FunctionType)
    }
    twin = python_types.FunctionType(formula.__code__, {"tl": tl, **names}, formula.__name__)
    twin.__module__, twin.__qualname__ = formula.__module__, formula.__qualname__
    return triton.jit(twin)


def constants(
    rule: Rule,
    formats: Sequence[str],
    dims: int,
    stochastic: bool | tuple[bool, ...],
    *,
    scaled: bool = False,
    has_found_inf: bool = False,
    has_grad_scale: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of :func:`update`; ``formats`` are "bf16", "fp16" or "fp32", written tensors first."""
    return {
        "FORMULA": bind(rule.formula),
        "FORMATS": sum(FORMATS[name] << (2 * c) for c, name in enumerate(formats)),
        "WRITTEN": len(formats) - rule.reads,
        "COLUMNS": len(formats),
        "SCALARS": rule.scalars,
        "DIMS": dims,
        "STOCHASTIC": sum(flag << slot for slot, flag in enumerate(slots(stochastic, len(formats) - rule.reads))),
        "RAW": rule.raw,
        "KEEPS_NONFINITE": rule.keeps_nonfinite,
        "SCALED": scaled or has_grad_scale,
        "HAS_FOUND_INF": has_found_inf,
        "HAS_GRAD_SCALE": has_grad_scale,
        "PAIRS": PAIRS,
        "SINGLES": SINGLES,
    }


def options(warp_size: int) -> dict[str, Any]:
    """Compiler options. Fixed: an autotuner would run an in-place update many times over."""
    return {"num_warps": THREADS // warp_size, "num_stages": 1, "enable_fp_fusion": False}
