"""The Triton kernels for stacks of matrices: sums in the order of ``subulp.formula.sums``, and updates with factors.

A program of a sum adds ROWS pieces, or the columns of a strip; further launches *fold* the results, a level of pieces (or of
strips) at a time. All additions are in fp64 and in a fixed order, so the bits are those of the other backends.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005, SIM108  Triton knows no starred displays, and both sides of its conditional expressions are typed

from __future__ import annotations

import triton
import triton.language as tl

from subulp.backends.triton.kernel import _global_index
from subulp.backends.triton.lanes import load_singles, single_draws, slot_keys, store_singles
from subulp.backends.triton.tables import ROW_FIELDS
from subulp.formula.sums import LANES, PIECE, STRIP

ROWS = 16
"""Rows of a program that sums pieces."""

COLS = 128
"""Columns of a program that sums a strip, or folds strips."""

_LANES = tl.constexpr(LANES)
_PIECE = tl.constexpr(PIECE)
_STRIP = tl.constexpr(STRIP)
_ROW_FIELDS = tl.constexpr(ROW_FIELDS)
_TREE = tl.constexpr(LANES.bit_length() - 1)

FIXED = ["factor"]
POINTERS = ["table", "chunks", "scalar_table", "sums"]


@triton.jit
def _tree(x, ROWS: tl.constexpr):
    """Neighbouring lanes added until one is left; ``x`` (ROWS, LANES)."""
    for level in tl.static_range(_TREE):
        even, odd = tl.split(tl.reshape(x, (ROWS, _LANES >> (level + 1), 2)))
        x = even + odd
    return tl.reshape(x, (ROWS,))


@triton.jit
def _value(
    row,
    position,
    column,
    stack_row,
    inside,
    scalars,
    factor,
    VALUE: tl.constexpr,
    SIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_COL: tl.constexpr,
    BY_ROW: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The quantity at positions of a tensor, in fp64; 0 outside."""
    codes = ()
    for c in tl.static_range(COLUMNS):
        codes = codes + (load_singles(tl.load(row + c), position, inside, (SIZES >> 8 * c) & 255),)
    for c in tl.static_range(BY_COL):
        codes = codes + (load_singles(tl.load(row + COLUMNS + c), column, inside, 4),)
    numbers = ()
    for k in tl.static_range(BY_ROW):
        address = tl.load(row + COLUMNS + BY_COL + k).to(tl.pointer_type(tl.float32))
        numbers = numbers + (tl.load(address + stack_row, mask=inside, other=0.0),)
    numbers = numbers + scalars
    if SCALED:
        value = VALUE(codes, numbers, factor)
    else:
        value = VALUE(codes, numbers)
    return tl.where(inside, value, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=[*POINTERS, *FIXED], do_not_specialize_on_alignment=POINTERS)
def sum_pieces(
    table,
    chunks,
    scalar_table,
    sums,
    factor,
    VALUE: tl.constexpr,
    SIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_COL: tl.constexpr,
    BY_ROW: tl.constexpr,
    SCALARS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of pieces: ``chunks`` (programs, 3): tensor, first row over the stack, piece.

    ``table`` (tensors, COLUMNS + BY_COL + BY_ROW + 5): addresses, then rows of a matrix, width, rows of the stack, where the
    sums of pieces begin, and those of strips; ``scalar_table`` fp32 (tensors, SCALARS).
    """
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    t = tl.load(chunk)
    first = tl.load(chunk + 1)
    piece = tl.load(chunk + 2)
    row = table + t * (COLUMNS + BY_COL + BY_ROW + 5)
    shape = row + COLUMNS + BY_COL + BY_ROW
    rows = tl.load(shape)
    width = tl.load(shape + 1)
    count = tl.load(shape + 2)
    scalars = ()
    for s in tl.static_range(SCALARS):
        scalars = scalars + (tl.load(scalar_table + t * SCALARS + s),)
    stack_row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
    lane = tl.arange(0, _LANES)[None, :].to(tl.int64)
    begin = piece * _PIECE
    end = tl.minimum(width, begin + _PIECE)
    total = tl.full((ROWS, _LANES), 0.0, tl.float64)
    for step in range(begin, end, _LANES):
        column = step + lane
        inside = (stack_row < count) & (column < end)
        total = total + _value(
            row,
            stack_row * width + column,
            stack_row // rows * width + column,
            stack_row + 0 * lane,
            inside,
            scalars,
            factor,
            VALUE,
            SIZES,
            COLUMNS,
            BY_COL,
            BY_ROW,
            SCALED,
        )
    per_row = (width + _PIECE - 1) // _PIECE
    place = first + tl.arange(0, ROWS).to(tl.int64)
    tl.store(sums + tl.load(shape + 3) + place * per_row + piece, _tree(total, ROWS), mask=place < count)


@triton.jit(do_not_specialize=[*POINTERS, *FIXED], do_not_specialize_on_alignment=POINTERS)
def sum_strips(
    table,
    chunks,
    scalar_table,
    sums,
    factor,
    VALUE: tl.constexpr,
    SIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_COL: tl.constexpr,
    BY_ROW: tl.constexpr,
    SCALARS: tl.constexpr,
    SCALED: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sums of strips by column: ``chunks`` (programs, 3): tensor, strip over the stack, first column. Tables as above."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    t = tl.load(chunk)
    strip = tl.load(chunk + 1)
    row = table + t * (COLUMNS + BY_COL + BY_ROW + 5)
    shape = row + COLUMNS + BY_COL + BY_ROW
    rows = tl.load(shape)
    width = tl.load(shape + 1)
    scalars = ()
    for s in tl.static_range(SCALARS):
        scalars = scalars + (tl.load(scalar_table + t * SCALARS + s),)
    column = tl.load(chunk + 2) + tl.arange(0, COLS).to(tl.int64)
    inside = column < width
    per_matrix = (rows + _STRIP - 1) // _STRIP
    matrix = strip // per_matrix
    first = matrix * rows + (strip - matrix * per_matrix) * _STRIP
    last = tl.minimum(first + _STRIP, (matrix + 1) * rows)
    total = tl.full((COLS,), 0.0, tl.float64)
    for stack_row in range(first, last):
        total = total + _value(
            row,
            stack_row * width + column,
            matrix * width + column,
            stack_row + 0 * column,
            inside,
            scalars,
            factor,
            VALUE,
            SIZES,
            COLUMNS,
            BY_COL,
            BY_ROW,
            SCALED,
        )
    tl.store(sums + tl.load(shape + 4) + strip * width + column, total, mask=inside)


@triton.jit(do_not_specialize=["sums", "folded", "chunks"])
def fold_pieces(sums, folded, chunks):
    """One level of a vector's sum: ``chunks`` (programs, 3): where the piece begins, its size, where its sum goes."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    start = tl.load(chunk)
    size = tl.load(chunk + 1)
    lane = tl.arange(0, _LANES)[None, :]
    total = tl.full((1, _LANES), 0.0, tl.float64)
    for step in range(0, size, _LANES):
        total = total + tl.load(sums + start + step + lane, mask=step + lane < size, other=0.0)
    place = tl.load(chunk + 2) + tl.arange(0, 1)
    tl.store(folded + place, _tree(total, 1))


@triton.jit(do_not_specialize=["sums", "folded", "chunks"])
def fold_strips(sums, folded, chunks, COLS: tl.constexpr):
    """One level of the columns' sums: ``chunks`` (programs, 5): where the strip begins, its rows, width, first
    column, where its sums go."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 5
    start = tl.load(chunk)
    width = tl.load(chunk + 2)
    column = tl.load(chunk + 3) + tl.arange(0, COLS)
    total = tl.full((COLS,), 0.0, tl.float64)
    for r in range(tl.load(chunk + 1)):
        total = total + tl.load(sums + start + r * width + column, mask=column < width, other=0.0)
    tl.store(folded + tl.load(chunk + 4) + column, total, mask=column < width)


@triton.jit(
    do_not_specialize=["table", "chunks", "steps", "scalar_table", "factor"],
    do_not_specialize_on_alignment=["table", "chunks", "steps", "scalar_table"],
)
def update_factored(
    table,
    chunks,
    steps,
    scalar_table,
    factor,
    UPDATE: tl.constexpr,
    ENCODE: tl.constexpr,
    SIZES: tl.constexpr,
    DRAWS: tl.constexpr,
    WORDS: tl.constexpr,
    WRITTEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_COL: tl.constexpr,
    BY_ROW: tl.constexpr,
    SCALARS: tl.constexpr,
    DIMS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Updates one chunk of a stack of matrices, element by element.

    ``table`` as that of ``kernel.update``, with the addresses of the factors after those of the columns, and rows and width
    of a matrix at the end of a tensor's row; ``chunks`` as there.
    """
    chunk = chunks + tl.program_id(0).to(tl.int64) * 6
    t = tl.load(chunk)
    row = table + t * (COLUMNS + BY_COL + BY_ROW + _ROW_FIELDS + 2 * DIMS + 2)
    start = tl.load(chunk + 1)
    count = tl.load(chunk + 2).to(tl.int32)
    first_high = tl.load(chunk + 4)
    last_high = tl.load(chunk + 5)
    fields = row + COLUMNS + BY_COL + BY_ROW
    stream = tl.load(fields + 1)
    seed = tl.load(fields + 2)
    step = tl.load(steps + t)
    rows = tl.load(fields + _ROW_FIELDS + 2 * DIMS)
    width = tl.load(fields + _ROW_FIELDS + 2 * DIMS + 1)
    scalars = ()
    for s in tl.static_range(SCALARS):
        scalars = scalars + (tl.load(scalar_table + t * SCALARS + s),)
    keys = ()
    for slot in tl.static_range(WRITTEN):
        keys = keys + slot_keys(seed, stream, step, (WORDS >> 8 * slot) & 255, (DRAWS >> 8 * slot) & 255, first_high)
    for first in range(0, count, TILE):
        j = first + tl.arange(0, TILE)
        inside = j < count
        position = start + j
        stack_row = position // width
        column = position - stack_row * width + stack_row // rows * width
        codes = ()
        for c in tl.static_range(COLUMNS):
            codes = codes + (load_singles(tl.load(row + c), position, inside, (SIZES >> 8 * c) & 255),)
        for c in tl.static_range(BY_COL):
            codes = codes + (load_singles(tl.load(row + COLUMNS + c), column, inside, 4),)
        numbers = ()
        for k in tl.static_range(BY_ROW):
            address = tl.load(row + COLUMNS + BY_COL + k).to(tl.pointer_type(tl.float32))
            numbers = numbers + (tl.load(address + stack_row, mask=inside, other=0.0),)
        numbers = numbers + scalars
        if SCALED:
            new = UPDATE(codes, numbers, factor)
        else:
            new = UPDATE(codes, numbers)
        index = _global_index(row, start, j, COLUMNS + BY_COL + BY_ROW, DIMS)
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
            store_singles(tl.load(row + slot), position, inside, code, (SIZES >> 8 * slot) & 255)
