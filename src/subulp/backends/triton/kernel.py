"""The one Triton kernel, specialised by rule and storage formats.

A program updates one chunk of one tensor. The *fast* part of a chunk is walked in pairs of elements, with 128-bit
accesses. The rest (the last few elements, a view that is not 16-byte aligned, an odd first index, a strided layout) is
walked element by element and gets the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005, SIM108  Triton knows no starred displays, and both sides of its conditional expressions are typed

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl

from subulp.backends.triton.bindings import jitted
from subulp.backends.triton.lanes import (
    load_pairs,
    load_singles,
    pair_draws,
    single_draws,
    slot_keys,
    store_pairs,
    store_singles,
)
from subulp.backends.triton.tables import CHUNK_FIELDS, ROW_FIELDS, TILE, VECTOR
from subulp.formula.noise import word_of
from subulp.formula.rule import Rule, slots
from subulp.storage.codec import Codec
from subulp.storage.element import element_of

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
    UPDATE: tl.constexpr,
    ENCODE: tl.constexpr,
    SIZES: tl.constexpr,
    DRAWS: tl.constexpr,
    WORDS: tl.constexpr,
    WRITTEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    DIMS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    PAIRS: tl.constexpr,
    SINGLES: tl.constexpr,
):
    """Updates one chunk.

    Shapes: ``table`` int64 (tensors, COLUMNS + 4 + 2 * DIMS) and ``chunks`` int64 (programs, 6), see tables.py;
    ``steps`` int64 (lines,); ``scalar_table`` fp32 (lines, SCALARS); ``found_inf`` and ``grad_scale`` fp32 of one
    element, read if the flags say so. SIZES (bytes of an element) has a byte for each column, DRAWS (bits of a draw) and
    WORDS (numbers of noise words) one for each written column, the first column's lowest.
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
        keys = keys + slot_keys(seed, stream, step, (WORDS >> 8 * slot) & 255, (DRAWS >> 8 * slot) & 255, first_high)
    addresses = ()
    for c in tl.static_range(COLUMNS):
        addresses = addresses + (tl.load(row + c) + start * ((SIZES >> 8 * c) & 255),)

    first_index = tl.load(row + COLUMNS) + start
    pairs = tl.multiple_of(fast // 2, _VECTOR_PAIRS)
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        inside = pair < pairs
        even = ()
        odd = ()
        for c in tl.static_range(COLUMNS):
            code0, code1 = load_pairs(addresses[c], pair, inside, (SIZES >> 8 * c) & 255)
            even = even + (code0,)
            odd = odd + (code1,)
        if SCALED:
            new0 = UPDATE(even, scalars, factor)
            new1 = UPDATE(odd, scalars, factor)
        else:
            new0 = UPDATE(even, scalars)
            new1 = UPDATE(odd, scalars)
        for slot in tl.static_range(WRITTEN):
            draw0, draw1 = pair_draws(first_index, pair, keys[2 * slot], keys[2 * slot + 1], (DRAWS >> 8 * slot) & 255)
            code0 = ENCODE(slot, new0[slot], draw0, even[slot])
            code1 = ENCODE(slot, new1[slot], draw1, odd[slot])
            store_pairs(addresses[slot], pair, inside, code0, code1, (SIZES >> 8 * slot) & 255)

    for first in range(fast, count, SINGLES):
        j = first + tl.arange(0, SINGLES)
        inside = j < count
        codes = ()
        for c in tl.static_range(COLUMNS):
            codes = codes + (load_singles(addresses[c], j, inside, (SIZES >> 8 * c) & 255),)
        index = _global_index(row, start, j, COLUMNS, DIMS)
        if SCALED:
            new = UPDATE(codes, scalars, factor)
        else:
            new = UPDATE(codes, scalars)
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
                (WORDS >> 8 * slot) & 255,
                (DRAWS >> 8 * slot) & 255,
            )
            code = ENCODE(slot, new[slot], draw, codes[slot])
            store_singles(addresses[slot], j, inside, code, (SIZES >> 8 * slot) & 255)


def constants(
    rule: Rule,
    codecs: tuple[Codec, ...],
    dims: int,
    stochastic: bool | tuple[bool, ...],
    *,
    scaled: bool = False,
    has_found_inf: bool = False,
    has_grad_scale: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of :func:`update`; ``codecs`` are those of the columns, written ones first."""
    written = len(codecs) - len(rule.reads)
    drawn = slots(stochastic, written)
    scaled = scaled or has_grad_scale
    element = element_of(rule, codecs, drawn, scaled)
    return {
        "UPDATE": jitted(element.update),
        "ENCODE": jitted(element.encode),
        "SIZES": packed(codec.bits // 8 for codec in codecs),
        "DRAWS": packed(element.draws),
        "WORDS": packed(word_of(slot, bits) for slot, bits in enumerate(element.draws)),
        "WRITTEN": written,
        "COLUMNS": len(codecs),
        "SCALARS": len(rule.scalars),
        "DIMS": dims,
        "SCALED": scaled,
        "HAS_FOUND_INF": has_found_inf,
        "HAS_GRAD_SCALE": has_grad_scale,
        "PAIRS": PAIRS,
        "SINGLES": SINGLES,
    }


def packed(numbers: Iterable[int]) -> int:
    """Numbers below 256 as one: Triton before 3.6 takes no tuples of constants."""
    return int.from_bytes(bytes(numbers), "little")


def options(warp_size: int) -> dict[str, Any]:
    """Compiler options. Fixed: an autotuner would run an in-place update many times over."""
    return {"num_warps": THREADS // warp_size, "num_stages": 1, "enable_fp_fusion": False}
