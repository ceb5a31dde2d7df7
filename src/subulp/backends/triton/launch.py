"""The GPU backend: one Triton launch for a bucket of any number of tensors.

The kernel (kernel.py) finds its tensors in two tables on the device (tables.py): a row for each tensor,
and a map from programs to chunks. The step and the scalars are a third, tiny table: uploaded every step, or made on the
device for graph capture. They are values, not constants: a change of learning rate compiles nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.backends.triton import kernel as triton_kernel
from subulp.backends.triton.tables import (
    DeviceTables,
    Table,
    chunk_map,
    fast_tensors,
    is_capturing,
    layout_table,
    upload,
)
from subulp.formula.rule import Rule
from subulp.storage import CODECS

NAME = "triton"
READS_DEVICE_STEPS = True

_tables = DeviceTables(capacity=8192)


def run(
    rule: Rule,
    bucket: Bucket,
    *,
    seed: int,
    stochastic: bool | tuple[bool, ...],
    read_factor: float = 1.0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``.

    Args:
        rule: the update.
        bucket: its tensors. ``bucket.steps`` and ``bucket.scalars`` may both be tensors on the device, with one entry
            for each row: then the host does not read them, and a captured graph takes their values at each replay.
        seed: of the noise, 0 <= seed < 2**64.
        stochastic: round 16-bit tensors stochastically, else to nearest; for all written ones, or for each.
        read_factor: see above.
        grad_scale: fp32, one element, on the device: ``read_factor`` is divided by it.
        found_inf: fp32, one element, on the device: if it is not 0, nothing changes.

    Raises:
        RuntimeError: during graph capture, if the step is not a device tensor, or if no step of such tensors has run
            before the capture.
    """
    columns = (*bucket.written, *bucket.reads)
    sizes = np.fromiter(map(Tensor.numel, columns[0]), np.int64, len(columns[0]))
    if not sizes.any():
        return
    device = bucket.device
    steps_on_device = isinstance(bucket.steps, Tensor)
    pointers = np.empty((len(sizes), len(columns)), dtype=np.int64)
    for c, column in enumerate(columns):
        pointers[:, c] = np.fromiter(map(Tensor.data_ptr, column), np.int64, len(column))
    layouts = layout_table(bucket.layouts, sizes)
    fast = fast_tensors(pointers, layouts)
    noise = np.empty((len(sizes), 3), dtype=np.int64)
    noise[:, 0] = np.fromiter(bucket.streams, np.int64, len(sizes))
    noise[:, 1] = np.uint64(seed).astype(np.int64)
    steps, scalars, noise[:, 2] = _lines(bucket)
    rows = np.concatenate([pointers, layouts[:, :1], noise, layouts[:, 1:]], axis=1)
    with on_device(device):
        table = _tables.get(("rows", rows.shape, rows.tobytes()), lambda: rows, device, steps_on_device)
        content = ("chunks", sizes.tobytes(), fast.tobytes(), layouts.tobytes())
        chunks = _tables.get(content, lambda: chunk_map(sizes, fast, layouts), device, steps_on_device)
        if not isinstance(steps, Tensor):
            steps, scalars = _upload_lines(steps, scalars, device)
        triton_kernel.update[(len(chunks),)](
            table,
            chunks,
            steps,
            scalars,
            steps if found_inf is None else found_inf,
            steps if grad_scale is None else grad_scale,
            read_factor,
            **triton_kernel.constants(
                rule,
                tuple(CODECS[d] for d in bucket.dtypes),
                (layouts.shape[1] - 1) // 2,
                stochastic,
                scaled=read_factor != 1.0,
                has_found_inf=found_inf is not None,
                has_grad_scale=grad_scale is not None,
            ),
            **triton_kernel.options(warp_size(device.type)),
        )
    bucket.finish()


def on_device(device: torch.device) -> Any:
    """A context in which this is the current device."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@cache
def warp_size(device_type: str) -> int:
    if device_type == "cpu":
        return 32
    from triton.runtime import driver

    return int(driver.active.get_current_target().warp_size)


def _lines(bucket: Bucket) -> tuple[Any, Any, Table]:
    """The distinct (step, scalars) of the bucket, as steps and rows of scalars, and which of them each tensor takes."""
    steps: Any = bucket.steps
    scalars: Any = bucket.scalars
    if isinstance(steps, Tensor):
        return steps.to(torch.int64), scalars.to(torch.float32).contiguous(), bucket.rows
    pairs = np.stack([steps, bucket.rows], axis=1)
    if (pairs == pairs[0]).all():
        return steps[:1], scalars[bucket.rows[:1]], np.zeros(len(pairs), dtype=np.int64)
    distinct, lines = np.unique(pairs, axis=0, return_inverse=True)
    return distinct[:, 0], scalars[distinct[:, 1]], lines.reshape(-1).astype(np.int64)


def _upload_lines(steps: Table, scalars: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    if is_capturing(device):
        raise RuntimeError(
            "A step is captured in a graph while its step counter is in host memory, so every replay would repeat this "
            "one step: construct the optimizer with capturable=True."
        )
    values = scalars.astype(np.float32).reshape(-1)
    packed = np.zeros(len(steps) + (len(values) + 1) // 2, dtype=np.int64)
    packed[: len(steps)] = steps
    packed[len(steps) :].view(np.float32)[: len(values)] = values
    table = upload(packed, device)
    return table[: len(steps)], table[len(steps) :].view(torch.float32)
