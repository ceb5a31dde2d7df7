"""The CPU backend: one native call a thread for a bucket of any number of tensors.

Per element of bf16 AdamW it reads p, g, m, v and writes p, m, v: 14 bytes, once. The bucket is cut into chunks, which
threads take from a shared counter; the bits do not depend on who takes which.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.backends.forks import wait_for_all
from subulp.backends.numba.kernel import advance_kernel, kernel_for
from subulp.formula.rule import Rule, slots
from subulp.numerics.layout import Layout
from subulp.storage import CODECS

NAME = "numba"
READS_DEVICE_STEPS = False

CHUNK = 1 << 16
"""Elements that a thread takes at a time."""

ELEMENTS_PER_THREAD = 1 << 15
"""Below this many elements another thread costs more than it saves."""

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


class Launch:
    """What of a bucket stays the same from step to step: the kernel, and the tables that depend on shapes alone."""

    def __init__(
        self,
        rule: Rule,
        dtypes: Sequence[torch.dtype],
        stochastic: bool | tuple[bool, ...],
        sizes: Sequence[int],
        layouts: Sequence[Layout | None],
    ) -> None:
        drawn = slots(stochastic, len(dtypes) - len(rule.reads))
        self._kernel = partial(kernel_for, rule, tuple(CODECS[d] for d in dtypes), drawn)
        self.kernel = self._kernel()
        self.raw = rule.raw
        self.width = len(rule.scalars)
        counts = np.array(sizes, dtype=np.int64)
        self.elements = int(counts.sum())
        self.chunks = _chunk_table(counts)
        self.layouts = layout_table(layouts, counts)

    def __call__(
        self,
        pointers: npt.NDArray[np.int64],
        scalars: npt.NDArray[np.float64],
        rows: npt.NDArray[np.int64],
        streams: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        seed: int,
        factor: float,
    ) -> None:
        """Runs the update. ``pointers`` has shape (tensors, columns); the others are as in a bucket."""
        narrow = np.zeros((len(scalars), max(self.width, 1)), dtype=np.float32)
        narrow[:, : self.width] = scalars
        counter = np.zeros(1, dtype=np.int64)
        arguments: tuple[Any, ...] = (
            pointers,
            self.layouts,
            self.chunks,
            counter,
            narrow,
            rows,
            streams,
            steps,
            np.uint64(seed),
            np.float32(factor),
        )
        kernel = self._kernel(factor) if self.raw else self.kernel
        threads = min(torch.get_num_threads(), -(-self.elements // ELEMENTS_PER_THREAD), len(self.chunks))
        helpers = [thread_pool().submit(kernel, *arguments) for _ in range(threads - 1)]
        try:
            kernel(*arguments)
        finally:
            wait_for_all(helpers)


def run(
    rule: Rule, bucket: Bucket, *, seed: int, stochastic: bool | tuple[bool, ...], read_factor: float = 1.0
) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``."""
    columns = (*bucket.written, *bucket.reads)
    launch = Launch(rule, bucket.dtypes, stochastic, list(map(Tensor.numel, columns[0])), bucket.layouts)
    streams = np.array(bucket.streams, dtype=np.int64)
    launch(pointer_table(columns), bucket.scalars, bucket.rows, streams, bucket.steps, seed, read_factor)
    bucket.finish()


def pointer_table(columns: Sequence[Sequence[Tensor]]) -> npt.NDArray[np.int64]:
    """Data pointers, shape (tensors, columns)."""
    table = np.empty((len(columns[0]), len(columns)), dtype=np.int64)
    for c, column in enumerate(columns):
        table[:, c] = np.fromiter(map(Tensor.data_ptr, column), np.int64, len(column))
    return table


def advance(pointers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Adds one to the step counters (0-d fp64 in CPU memory) at the addresses in the first row.

    Returns their new values, and the streams (0-d int64) at the addresses in the second row.
    """
    result: npt.NDArray[np.int64] = advance_kernel()(pointers)
    return result


def thread_pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(32, os.cpu_count() or 1), thread_name_prefix="subulp")
    return _pool


def layout_table(layouts: Sequence[Layout | None], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows of base, sizes, strides; the innermost dimension last, outer ones padded with size 1. None: flat, from 0.

    Without layouts all are flat.
    """
    dims = max((len(layout.sizes) for layout in layouts if layout is not None), default=1)
    table = np.zeros((len(sizes), 1 + 2 * dims), dtype=np.int64)
    table[:, 1:dims] = 1
    table[:, dims] = sizes
    table[:, 2 * dims] = 1
    for i, layout in enumerate(layouts):
        if layout is not None:
            d = len(layout.sizes)
            table[i, 0] = layout.base
            table[i, 1 : 1 + dims - d] = 1
            table[i, 1 + dims - d : 1 + dims] = layout.sizes
            table[i, 1 + 2 * dims - d :] = layout.strides
    return table


def _chunk_table(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows of (tensor, start, stop)."""
    per_tensor = -(-sizes // CHUNK)
    tensor = np.repeat(np.arange(len(sizes)), per_tensor)
    first = np.cumsum(per_tensor) - per_tensor
    start = (np.arange(len(tensor)) - first[tensor]) * CHUNK
    return np.stack([tensor, start, np.minimum(start + CHUNK, sizes[tensor])], axis=1)
