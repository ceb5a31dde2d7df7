"""The kernel itself, in the subset of Python that Numba compiles: chunks, rows, segments, pairs of elements.

The names in capitals and the functions set to None here are filled in for each specialisation, by
``kernel.kernel_for``, before the functions are compiled.
"""

from typing import Any

import numpy as np

from subulp.formula.noise import PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1

u32, u64, i64 = np.uint32, np.uint64, np.int64

WRITTEN = 0
"""Number of written arrays."""
WORDS: tuple[int, ...] = ()
"""The noise word of each written array."""
STOCHASTIC = False
"""Whether any store needs noise."""
PAIRED = False
"""Whether any written array is 16 bits wide, so that elements are best taken in pairs."""

formula: Any = None
arguments: Any = None
load_one: Any = None
load_pair: Any = None
store_one: Any = None
store_pair: Any = None
offset: Any = None
keys_of: Any = None
pointers_of: Any = None
scalars_of: Any = None
take_next: Any = None


def philox(seed, stream, step, block):  # type: ignore[no-untyped-def]
    """``subulp.formula.noise.philox4x32`` of one block of keys."""
    c0, c1, c2 = u64(step & i64(0xFFFFFFFF)), u64(stream & i64(0xFFFFFFFF)), u64(stream >> i64(32))
    c3 = u64(block) & u64(0xFFFFFFFF)
    k0, k1 = u64(seed & u64(0xFFFFFFFF)), u64(seed >> u64(32))
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = u64(u64(PHILOX_M0) * c0), u64(u64(PHILOX_M1) * c2)
        c0, c1, c2, c3 = (
            u64(u64(p1 >> u64(32)) ^ c1 ^ k0),
            u64(p1 & u64(0xFFFFFFFF)),
            u64(u64(p0 >> u64(32)) ^ c3 ^ k1),
            u64(p0 & u64(0xFFFFFFFF)),
        )
        k0 = u64(k0 + u64(PHILOX_W0)) & u64(0xFFFFFFFF)
        k1 = u64(k1 + u64(PHILOX_W1)) & u64(0xFFFFFFFF)
    return u32(c0), u32(c1), u32(c2), u32(c3)


def segment(addresses, position, count, index, stride, scalars, factor, seed, stream, step, scratch):  # type: ignore[no-untyped-def]
    """Updates ``count`` elements from storage ``position``; their global indices are ``index + j * stride``.

    All of them share ``index >> 32``.
    """
    if STOCHASTIC:
        last = i64(-1)
        r0 = r1 = r2 = r3 = u32(0)
        for slot in range(WRITTEN):
            word = WORDS[slot]
            high = index >> i64(32) if word >= 128 else index >> i64(33)
            block = i64(word >> 1) | (high << i64(8))
            if block != last:
                r0, r1, r2, r3 = philox(seed, stream, step, block)
                last = block
            scratch[0, 2 * slot] = r2 if word & 1 else r0
            scratch[0, 2 * slot + 1] = r3 if word & 1 else r1
    keys = keys_of(scratch, i64(0))
    done = i64(0)
    if PAIRED and stride == 1:
        if index & i64(1) and count > 0:
            update_one(addresses, position, index, scalars, factor, keys)
            done = i64(1)
        pairs = (count - done) >> i64(1)
        first = offset(addresses, position + done)
        counter = u32((index + done) >> i64(1))
        for j in range(pairs):
            even, odd = load_pair(first, j)
            new_even = formula(*arguments(even, scalars, factor))
            new_odd = formula(*arguments(odd, scalars, factor))
            store_pair(first, j, new_even, new_odd, even[0], odd[0], counter, keys)
            counter = u32(counter + u32(1))
        done += pairs << i64(1)
    for j in range(done, count):
        update_one(addresses, position + j, index + j * stride, scalars, factor, keys)


def update_one(addresses, position, index, scalars, factor, keys):  # type: ignore[no-untyped-def]
    (old,) = load_one(addresses, position)
    new = formula(*arguments(old, scalars, factor))
    store_one(addresses, position, new, old[0], index, keys)


def kernel(pointers, layouts, chunks, counter, scalar_rows, rows, streams, steps, seed, factor):  # type: ignore[no-untyped-def]
    """Takes chunks until none is left.

    Shapes: ``pointers`` (tensors, columns); ``layouts`` (tensors, 1 + 2 * dims): base, sizes, strides, innermost last;
    ``chunks`` (chunks, 3): tensor, start, stop; ``scalar_rows`` (rows, scalars); the others one entry a tensor.
    """
    dims = (layouts.shape[1] - 1) >> 1
    scratch = np.zeros((1, 2 * WRITTEN), dtype=np.uint32)
    while True:
        c = take_next(counter)
        if c >= chunks.shape[0]:
            break
        t, position, stop = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        addresses = pointers_of(pointers, t)
        scalars = scalars_of(scalar_rows, rows[t])
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
            segment(addresses, position, count, index, stride, scalars, factor, seed, streams[t], steps[t], scratch)
            position += count
