"""Sums over matrices, in the subset of Python that Numba compiles. The order of additions: ``subulp.formula.sums``.

The names set to None here are filled in for each specialisation, as those of ``body.py``.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np

from subulp.formula.sums import LANES, PIECE, STRIP

i64 = np.int64

TOGETHER = 4
"""Rows that are added to the sums of columns at a time, which so go through memory a quarter as often."""

pointers_of: Any = None
row_pointers_of: Any = None
scalars_of: Any = None
row_scalars: Any = None
offset: Any = None
fill: Any = None
clear: Any = None
add_to: Any = None
add_all: Any = None
piece_sum: Any = None
address_of: Any = None
take_next: Any = None
WITH_COLS = False


def tree(lanes):
    """Neighbouring lanes added until one is left."""
    count = LANES
    while count > 1:
        count >>= 1
        for k in range(count):
            lanes[k] = lanes[2 * k] + lanes[2 * k + 1]
    return lanes[0]


def kernel(
    pointers,
    row_pointers,
    shapes,
    tiles,
    chunks,
    counter,
    scalar_table,
    factor,
    piece_starts,
    strip_starts,
    pieces,
    strips,
):
    """Takes chunks of tiles until none is left; writes the sums of pieces, and of strips if they are wanted.

    Shapes: ``pointers`` (tensors, columns), the factors by column last; ``row_pointers`` (tensors, factors by row);
    ``shapes`` (tensors, 3); ``tiles`` (tensors, 2): strips and pieces of a matrix; ``chunks`` (chunks, 3): tensor, first,
    last tile; ``scalar_table`` (tensors, scalars).
    """
    values = np.zeros(TOGETHER * PIECE, dtype=np.float32)
    place, strip_place = address_of(values), address_of(strips)
    while True:
        c = take_next(counter)
        if c >= chunks.shape[0]:
            break
        t = chunks[c, 0]
        addresses, row_addresses = pointers_of(pointers, t), row_pointers_of(row_pointers, t)
        common = scalars_of(scalar_table, t)
        rows, width = shapes[t, 1], shapes[t, 2]
        count = tiles[t, 1]
        for tile in range(chunks[c, 1], chunks[c, 2]):
            strip, piece = tile // count, tile % count
            matrix = strip // tiles[t, 0]
            first = matrix * rows + (strip - matrix * tiles[t, 0]) * STRIP
            start = piece * PIECE
            size = min(width - start, i64(PIECE))
            whole = (size + LANES - 1) // LANES * LANES
            for k in range(TOGETHER):
                for j in range(size, whole):
                    values[k * PIECE + j] = 0.0
            totals = strip_place + i64(8) * (strip_starts[t] + strip * width + start)
            if WITH_COLS:
                for j in range(size):
                    clear(totals, j)
            last = min(first + STRIP, (matrix + 1) * rows)
            for row in range(first, last):
                own = row_scalars(row_addresses, common, row)
                here = offset(addresses, row * width + start, matrix * width + start)
                k = (row - first) % TOGETHER
                buffer = place + i64(4 * PIECE) * k
                for j in range(size):
                    fill(here, buffer, j, own, factor)
                pieces[piece_starts[t] + row * count + piece] = piece_sum(buffer, whole // LANES)
                if WITH_COLS:
                    if k == TOGETHER - 1:
                        for j in range(size):
                            add_all(totals, place, j)
                    elif row == last - 1:
                        for i in range(k + 1):
                            for j in range(size):
                                add_to(totals, place + i64(4 * PIECE) * i, j)


def vector_sum(x, start, size, lanes):
    """The sum of ``x[start : start + size]``, which is overwritten."""
    if size == 0:
        return 0.0
    while True:
        count = (size + PIECE - 1) // PIECE
        for piece in range(count):
            first = start + piece * PIECE
            n = min(size - piece * PIECE, i64(PIECE))
            for k in range(LANES):
                lanes[k] = 0.0
            for j in range(n):
                lanes[j % LANES] += x[first + j]
            x[start + piece] = tree(lanes)
        if count == 1:
            return x[start]
        size = count


def finish(shapes, pieces, strips, row_sums, col_sums, totals):
    """Sums of pieces to those of rows, of strips to those of columns, and of rows to totals; the latter two if asked for."""
    lanes = np.zeros(LANES)
    piece_start = strip_start = row_start = col_start = i64(0)
    for t in range(shapes.shape[0]):
        count, rows, width = shapes[t, 0], shapes[t, 1], shapes[t, 2]
        per_row = (width + PIECE - 1) // PIECE
        for row in range(count * rows):
            if per_row == 1:
                row_sums[row_start + row] = pieces[piece_start + row]
            else:
                row_sums[row_start + row] = vector_sum(pieces, piece_start + row * per_row, per_row, lanes)
        piece_start += count * rows * per_row
        if col_sums.shape[0] > 0:
            per_col = (rows + STRIP - 1) // STRIP
            for matrix in range(count):
                first = strip_start + matrix * per_col * width
                left = per_col
                while left > 1:
                    merged = (left + STRIP - 1) // STRIP
                    for strip in range(merged):
                        into = first + strip * width
                        begin = first + strip * STRIP * width
                        for j in range(width):
                            strips[into + j] = 0.0 + strips[begin + j]
                        for r in range(strip * STRIP + 1, min((strip + 1) * STRIP, left)):
                            for j in range(width):
                                strips[into + j] += strips[first + r * width + j]
                    left = merged
                for j in range(width):
                    col_sums[col_start + matrix * width + j] = strips[first + j] if per_col > 0 else 0.0
            strip_start += count * per_col * width
        col_start += count * width
        if totals.shape[0] > 0:
            # In a copy: the rows' sums may be asked for too.
            copy = row_sums[row_start : row_start + count * rows].copy()
            totals[t] = vector_sum(copy, i64(0), count * rows, lanes)
        row_start += count * rows
