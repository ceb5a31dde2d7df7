"""The tables that the Triton kernel reads: how they are computed, uploaded and kept on the device.

An upload never waits for the device. What was uploaded is found again by its content, so a table cannot be stale:
gradients at other addresses than before give another table, and the old addresses give the old one again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.numerics.layout import Layout

TILE = 1024
"""Elements that a program updates at a time."""

CHUNK = 16 * TILE
"""Elements of a program at most: enough to hide what it pays to find its tensor and its noise keys."""

PROGRAMS = 4096
"""Chunks are cut smaller, down to one tile, while there are fewer programs than this."""

VECTOR = 8
"""Elements in the widest access: the fast part of a chunk is a multiple of it."""

ALIGNMENT = 16
"""Bytes of the widest access."""

ROW_FIELDS = 4
"""Fields in a tensor's row between its pointers and its layout's sizes and strides: base, stream, seed, line."""

CHUNK_FIELDS = 6
"""Fields of a chunk: tensor, start, count, fast count, first and last ``global index >> 32``."""

Table = npt.NDArray[np.int64]


def layout_table(layouts: Sequence[Layout | None], sizes: Table) -> Table:
    """(tensors, 1 + 2 * dims): base, sizes, strides of each tensor; dimensions that a layout lacks have size 1."""
    dims = max((len(layout.sizes) for layout in layouts if layout is not None), default=1)
    table = np.zeros((len(sizes), 1 + 2 * dims), dtype=np.int64)
    table[:, 1 : 1 + dims] = 1
    table[:, dims] = sizes
    table[:, 2 * dims] = 1
    for i, layout in enumerate(layouts):
        if layout is not None:
            d = len(layout.sizes)
            table[i, 0] = layout.base
            table[i, 1 + dims - d : 1 + dims] = layout.sizes
            table[i, 1 + 2 * dims - d :] = layout.strides
    return table


def fast_tensors(pointers: Table, layouts: Table) -> npt.NDArray[np.bool_]:
    """Which tensors the kernel can walk in 16-byte vectors: all pointers aligned, global indices even and in a row."""
    dims = (layouts.shape[1] - 1) // 2
    in_a_row = (layouts[:, 1:dims] == 1).all(axis=1) & (layouts[:, 2 * dims] == 1)
    result: npt.NDArray[np.bool_] = in_a_row & (layouts[:, 0] % 2 == 0) & (pointers % ALIGNMENT == 0).all(axis=1)
    return result


def chunk_map(sizes: Table, fast: npt.NDArray[np.bool_], layouts: Table) -> Table:
    """(chunks, 6): tensor, start, count, fast count, first and last value of ``global index >> 32``.

    A chunk in which that value changes is not fast: its elements have different noise keys.
    """
    chunk = _chunk_size(int(sizes.sum()))
    per_tensor = -(-sizes // chunk)
    tensor = np.repeat(np.arange(len(sizes)), per_tensor)
    start = (np.arange(len(tensor)) - (np.cumsum(per_tensor) - per_tensor)[tensor]) * chunk
    count = np.minimum(sizes[tensor] - start, chunk)
    dims = (layouts.shape[1] - 1) // 2
    base, digits, strides = layouts[:, 0], layouts[:, 1 : 1 + dims], layouts[:, 1 + dims :]
    if dims == 1:
        first = base[tensor] + start * strides[tensor, 0]
        last = first + (count - 1) * strides[tensor, 0]
    else:
        first = base[tensor]
        last = (base + ((digits - 1) * strides).sum(axis=1))[tensor]
        plain = fast[tensor]
        first = np.where(plain, first + start, first)
        last = np.where(plain, first + count - 1, last)
    first_high, last_high = first >> 32, last >> 32
    fast_count = np.where(fast[tensor] & (first_high == last_high), count // VECTOR * VECTOR, 0)
    return np.stack([tensor, start, count, fast_count, first_high, last_high], axis=1)


def _chunk_size(elements: int) -> int:
    chunk = CHUNK
    while chunk > TILE and elements < chunk * PROGRAMS:
        chunk //= 2
    return chunk


class DeviceTables:
    """Device copies of host tables, by content; the least recently used are dropped beyond ``capacity``.

    Copies belong to the stream that made them, since nothing makes another stream wait for the upload.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._captured: list[Tensor] = []
        self._spares: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._lock = threading.Lock()

    def get(self, content: Hashable, build: Callable[[], Table], device: torch.device, capturable: bool) -> Tensor:
        """The table with this content on the device; ``build`` computes it if it is not there yet.

        Args:
            content: everything that ``build`` depends on.
            build: gives the table.
            device: where it goes, the current device.
            capturable: a graph may be captured with a table of this size: pinned memory is set aside for its upload,
                since none can be allocated during a capture.

        Raises:
            RuntimeError: during a capture, if nothing was set aside: no step of such tensors has run before.
        """
        key = (content, device, _stream(device))
        capturing = is_capturing(device)
        with self._lock:
            table = self._known.get(key)
            if table is not None:
                self._known.move_to_end(key)
                if capturing:  # The graph reads the table for as long as it lives.
                    self._captured.append(table)
                return table
        host = build()
        if capturing:
            return self._upload_in_capture(host, device)
        table = upload(host, device)
        with self._lock:
            self._known[key] = table
            if capturable and device.type != "cpu":
                spares = self._spares.setdefault((device, host.size), [])
                if not spares:
                    spares.append(torch.empty(host.size, dtype=torch.int64, pin_memory=True))
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return table

    def _upload_in_capture(self, host: Table, device: torch.device) -> Tensor:
        # The copy becomes a node of the graph: it happens at each replay and not now. So the table is of no use to
        # steps outside the graph, and its pinned source has to stay as it is.
        with self._lock:
            spares = self._spares.get((device, host.size))
            if not spares:
                raise RuntimeError(
                    "A step is captured in a graph, and no step of these parameters has run before: run at least one "
                    "step with capturable=True outside the capture (torch's usual warm-up), then capture."
                )
            pinned = spares.pop()
            pinned.numpy()[:] = host.reshape(-1)
            table = pinned.to(device, non_blocking=True)
            self._captured += [pinned, table]
        return table.view(host.shape)


def upload(host: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the current device; does not wait for it. (On CPU, for the interpreter: the array itself.)"""
    table = torch.from_numpy(host)
    # The pinned block is kept from reuse until the copy is done: torch's allocator records an event for it.
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a graph."""
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    probe = getattr(module, "is_current_stream_capturing", None)
    return probe is not None and bool(probe())


def _stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.get_device_module(device).current_stream(device).stream_id
