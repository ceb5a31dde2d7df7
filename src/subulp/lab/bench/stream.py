"""The time that memory alone takes: 14 bytes a parameter, read and written without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise

import numpy as np

BYTES = 14
"""A bf16 AdamW step reads p, g, exp_avg, exp_avg_sq and writes all but g: seven streams of two bytes."""

_ELEMENTS_PER_WORD = 4


def make_stream(elements: int, threads: int) -> Callable[[], None] | None:
    """A function that reads four arrays of ``elements`` bf16 numbers and writes three of them; None without numba.

    A native loop over 64-bit words, in place: each word of three arrays is combined with the fourth's by exclusive or,
    without which the compiler would drop the reads. Each thread has one contiguous part.
    """
    if find_spec("numba") is None:
        return None
    from numba import njit

    @njit(nogil=True)
    def loop(p, m, v, g):  # type: ignore[no-untyped-def]
        for i in range(p.size):
            word = g[i]
            p[i] ^= word
            m[i] ^= word
            v[i] ^= word

    words = -(-elements // _ELEMENTS_PER_WORD)
    arrays = [np.full(words, 0x0123456789ABCDEF + c, dtype=np.uint64) for c in range(4)]
    bounds = np.linspace(0, words, threads + 1).astype(int)
    parts = [tuple(a[start:stop] for a in arrays) for start, stop in pairwise(bounds)]
    pool = ThreadPoolExecutor(threads)

    def stream() -> None:
        helpers = [pool.submit(loop, *part) for part in parts[1:]]
        loop(*parts[0])
        for helper in helpers:
            helper.result()

    return stream
