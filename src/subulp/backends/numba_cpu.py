"""The CPU backend: one native call a thread for a bucket of any number of tensors.

Per element of bf16 AdamW it reads p, g, m, v and writes p, m, v: 14 bytes, once. The bucket is cut into chunks, which
threads take from a shared counter; the bits do not depend on who takes which.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.backends.numba_kernel import advance_kernel, kernel_for
from subulp.rules.rule import Rule

NAME = "numba"

CHUNK = 1 << 16
"""Elements that a thread takes at a time."""

ELEMENTS_PER_THREAD = 1 << 15
"""Below this many elements another thread costs more than it saves."""

_FORMAT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def run(rule: Rule, bucket: Bucket, *, seed: int, stochastic: bool, read_factor: float = 1.0) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``."""
    kernel = kernel_for(rule, tuple(_FORMAT[d] for d in bucket.dtypes), stochastic)
    columns = (*bucket.written, *bucket.reads)
    count = len(columns[0])
    pointers = np.empty((count, len(columns)), dtype=np.int64)
    for c, column in enumerate(columns):
        pointers[:, c] = addresses(column)
    sizes = np.fromiter(map(Tensor.numel, columns[0]), np.int64, count)
    scalars = np.zeros((len(bucket.scalars), max(rule.scalars, 1)), dtype=np.float32)
    scalars[:, : rule.scalars] = bucket.scalars
    arguments = (
        pointers,
        _layout_table(bucket, sizes),
        _chunks(sizes),
        np.zeros(1, dtype=np.int64),
        scalars,
        bucket.rows,
        np.fromiter(bucket.streams, np.int64, count),
        bucket.steps,
        np.uint64(seed),
        np.float32(read_factor),
    )
    _run_on_threads(kernel, arguments, int(sizes.sum()))
    for views in bucket.views:
        views.finish()


def addresses(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """The data pointers of some tensors."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def advance(steps: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """Adds one to each step counter (0-d fp32 tensors in CPU memory) and returns the new values."""
    result: npt.NDArray[np.int64] = advance_kernel()(addresses(steps))
    return result


def _layout_table(bucket: Bucket, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    dims = max((len(layout.sizes) for layout in bucket.layouts if layout is not None), default=1)
    table = np.zeros((len(sizes), 1 + 2 * dims), dtype=np.int64)
    table[:, 1:dims] = 1
    table[:, dims] = sizes
    table[:, 2 * dims] = 1
    for i, layout in enumerate(bucket.layouts):
        if layout is not None:
            d = len(layout.sizes)
            table[i, 0] = layout.base
            table[i, 1 : 1 + dims - d] = 1
            table[i, 1 + dims - d : 1 + dims] = layout.sizes
            table[i, 1 + 2 * dims - d :] = layout.strides
    return table


def _chunks(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(tensor, start, stop) of every chunk."""
    per_tensor = -(-sizes // CHUNK)
    tensor = np.repeat(np.arange(len(sizes)), per_tensor)
    first = np.cumsum(per_tensor) - per_tensor
    start = (np.arange(len(tensor)) - first[tensor]) * CHUNK
    return np.stack([tensor, start, np.minimum(start + CHUNK, sizes[tensor])], axis=1)


def _run_on_threads(kernel: Any, arguments: tuple[Any, ...], elements: int) -> None:
    threads = min(torch.get_num_threads(), -(-elements // ELEMENTS_PER_THREAD))
    if threads <= 1:
        kernel(*arguments)
        return
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(32, os.cpu_count() or 1), thread_name_prefix="subulp")
    helpers = [_pool.submit(kernel, *arguments) for _ in range(threads - 1)]
    kernel(*arguments)
    for helper in helpers:
        helper.result()
