"""The kernel itself, in the subset of Python that Numba compiles: chunks, rows, segments, pairs of elements.

The names set to None here are filled in for each specialisation, by ``kernel.kernel_for``, before the functions are compiled.
"""

from typing import Any

import numpy as np

u32, i64 = np.uint32, np.int64

PAIRED = False
"""Whether any written array is narrower than 32 bits, so that elements are best taken in pairs."""

update_one: Any = None
update_pair: Any = None
keys: Any = None
offset: Any = None
pointers_of: Any = None
scalars_of: Any = None
take_next: Any = None
row_pointers_of: Any = None
row_scalars: Any = None
by_column: Any = None


def keys_at(seed, stream, step, index):  # type: ignore[no-untyped-def]
    return keys(seed, stream, step, index)


def segment(addresses, position, count, index, stride, scalars, factor, seed, stream, step):  # type: ignore[no-untyped-def]
    """Updates ``count`` elements from storage ``position``; their global indices are ``index + j * stride``.

    All of them share ``index >> 32``.
    """
    own = keys_at(seed, stream, step, index)
    done = i64(0)
    if PAIRED and stride == 1:
        if index & i64(1) and count > 0:
            update_one(addresses, position, scalars, factor, index, own)
            done = i64(1)
        pairs = (count - done) >> i64(1)
        first = offset(addresses, position + done)
        counter = u32((index + done) >> i64(1))
        for j in range(pairs):
            update_pair(first, j, scalars, factor, counter, own)
            counter = u32(counter + u32(1))
        done += pairs << i64(1)
    for j in range(done, count):
        update_one(addresses, position + j, scalars, factor, index + j * stride, own)


def walk(addresses, position, stop, layouts, t, scalars, factor, seed, stream, step):  # type: ignore[no-untyped-def]
    """Updates the elements of tensor ``t`` from one storage position to another."""
    dims = (layouts.shape[1] - 1) >> 1
    inner, stride = layouts[t, dims], layouts[t, 2 * dims]
    while position < stop:
        rest = position // inner
        column = position - rest * inner
        index = layouts[t, 0] + column * stride
        for d in range(dims - 2, -1, -1):
            size = layouts[t, 1 + d]
            outer = rest // size
            index += (rest - outer * size) * layouts[t, 1 + dims + d]
            rest = outer
        count = min(inner - column, stop - position)
        left = ((((index >> i64(32)) + i64(1)) << i64(32)) - index + stride - i64(1)) // max(stride, i64(1))
        count = min(count, left)
        segment(addresses, position, count, index, stride, scalars, factor, seed, stream, step)
        position += count


def kernel(pointers, layouts, chunks, counter, scalar_rows, rows, streams, steps, seed, factor):  # type: ignore[no-untyped-def]
    """Takes chunks until none is left.

    Shapes: ``pointers`` (tensors, columns); ``layouts`` (tensors, 1 + 2 * dims): base, sizes, strides, innermost last;
    ``chunks`` (chunks, 3): tensor, start, stop; ``scalar_rows`` (rows, scalars); the others one entry a tensor.
    """
    while True:
        c = take_next(counter)
        if c >= chunks.shape[0]:
            break
        t, position, stop = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        scalars = scalars_of(scalar_rows, rows[t])
        walk(pointers_of(pointers, t), position, stop, layouts, t, scalars, factor, seed, streams[t], steps[t])


def factored(pointers, row_pointers, shapes, layouts, chunks, counter, scalar_rows, streams, steps, seed, factor):  # type: ignore[no-untyped-def]
    """:func:`kernel` for stacks of matrices with factors by row and by column.

    ``chunks`` (chunks, 3): tensor, first and last row, counted over the stack; ``shapes`` (tensors, 2): rows and columns of a
    matrix; ``row_pointers`` (tensors, factors by row); the last columns of ``pointers`` are the factors by column.
    """
    while True:
        c = take_next(counter)
        if c >= chunks.shape[0]:
            break
        t = chunks[c, 0]
        addresses, row_addresses = pointers_of(pointers, t), row_pointers_of(row_pointers, t)
        common = scalars_of(scalar_rows, t)
        rows, width = shapes[t, 0], shapes[t, 1]
        for row in range(chunks[c, 1], chunks[c, 2]):
            own = row_scalars(row_addresses, common, row)
            # Positions count over the stack, those of a factor by column over its matrix.
            here = by_column(addresses, (row // rows - row) * width)
            position = row * width
            walk(here, position, position + width, layouts, t, own, factor, seed, streams[t], steps[t])
