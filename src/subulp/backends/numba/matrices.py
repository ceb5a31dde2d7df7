"""Updates of matrices with factors by row and by column, and sums over them: one native call a thread for all tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.forks import wait_for_all
from subulp.backends.matrices import Matrices, Operand, Table, scalar_table, starts
from subulp.backends.numba.launch import CHUNK, ELEMENTS_PER_THREAD, layout_table, pointer_table, thread_pool
from subulp.backends.numba.matrix_kernels import factored_kernel, finish_kernel, sums_kernel
from subulp.formula.rule import Quantity, Rule, slots
from subulp.formula.sums import PIECE, STRIP
from subulp.storage import CODECS
from subulp.torch_internals import mark_written


def run_factored(
    rule: Rule,
    matrices: Matrices,
    steps: Sequence[int],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    *,
    seed: int,
    stochastic: bool | tuple[bool, ...],
    factor: float = 1.0,
) -> None:
    """Updates the written tensors of ``matrices`` in place; see ``subulp.backends.sums``."""
    columns, stacks = list(matrices.columns.values()), matrices.stacks
    codecs = tuple(CODECS[column[0].dtype] for column in columns)
    kernel = factored_kernel(rule, codecs, slots(stochastic, 1 + len(rule.states)))
    if "layouts" not in stacks.memo:
        stacks.memo["layouts"] = layout_table(stacks.layouts, stacks.sizes)
    chunks = _row_chunks(stacks.key)
    _run(
        kernel,
        len(chunks),
        int(stacks.sizes.sum()),
        _pointers(columns, [factors[name] for name in rule.by_col], stacks.col_starts),
        _pointers([], [factors[name] for name in rule.by_row], stacks.row_starts),
        np.ascontiguousarray(stacks.shapes[:, 1:]),
        stacks.memo["layouts"],
        chunks,
        np.zeros(1, dtype=np.int64),
        _narrow(scalar_table(rule.scalars, scalars, len(matrices))),
        np.array(stacks.streams, dtype=np.int64),
        np.array(steps, dtype=np.int64),
        np.uint64(seed),
        np.float32(factor),
    )
    written = columns[: 1 + len(rule.states)]
    mark_written(t for column in written for t in column)


def sums(
    quantity: Quantity,
    matrices: Matrices,
    over: Sequence[str],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """See ``subulp.backends.sums``."""
    columns, stacks = [matrices.columns[name] for name in quantity.reads], matrices.stacks
    codecs = tuple(CODECS[column[0].dtype] for column in columns)
    kernel = sums_kernel(quantity, codecs, "cols" in over)
    tiles, chunks, piece_starts, strip_starts = _tiles(stacks.key)
    pieces = np.empty(piece_starts[-1])
    strips = np.empty(strip_starts[-1] if "cols" in over else 0)
    _run(
        kernel,
        len(chunks),
        int(stacks.sizes.sum()),
        _pointers(columns, [factors[name] for name in quantity.by_col], stacks.col_starts),
        _pointers([], [factors[name] for name in quantity.by_row], stacks.row_starts),
        stacks.shapes,
        tiles,
        chunks,
        np.zeros(1, dtype=np.int64),
        _narrow(scalar_table(quantity.scalars, scalars, len(matrices))),
        np.float32(factor),
        piece_starts,
        strip_starts,
        pieces,
        strips,
    )
    rows, cols, totals = np.empty(stacks.row_starts[-1]), np.empty(stacks.col_starts[-1]), np.empty(len(matrices))
    finish_kernel()(
        stacks.shapes,
        pieces,
        strips,
        rows,
        cols if "cols" in over else cols[:0],
        totals if "all" in over else totals[:0],
    )
    found = {"rows": rows, "cols": cols, "all": totals}
    return {name: torch.from_numpy(found[name]) for name in over}


def _run(kernel: Callable[..., Any], chunks: int, elements: int, *arguments: Any) -> None:
    threads = min(torch.get_num_threads(), -(-elements // ELEMENTS_PER_THREAD), chunks)
    helpers = [thread_pool().submit(kernel, *arguments) for _ in range(threads - 1)]
    try:
        kernel(*arguments)
    finally:
        wait_for_all(helpers)


def _pointers(columns: Sequence[Sequence[Tensor]], packed: Sequence[Tensor], begins: Table) -> Table:
    """Addresses, shape (tensors, columns): of tensors, and of each tensor's segment of packed fp32 vectors."""
    table = np.empty((len(begins) - 1, max(1, len(columns) + len(packed))), dtype=np.int64)
    if columns:
        table[:, : len(columns)] = pointer_table(columns)
    for c, vector in enumerate(packed, len(columns)):
        table[:, c] = vector.data_ptr() + 4 * begins[:-1]
    return table


def _narrow(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    result = np.zeros((len(table), max(1, table.shape[1])), dtype=np.float32)
    result[:, : table.shape[1]] = table
    return result


@lru_cache(maxsize=256)
def _row_chunks(shapes: bytes) -> Table:
    """Rows of (tensor, first row, last row), about CHUNK elements each, rows counted over the stack."""
    table = np.frombuffer(shapes, dtype=np.int64).reshape(-1, 3)
    count, width = table[:, 0] * table[:, 1], table[:, 2]
    return _cut(np.where(width > 0, count, 0), np.maximum(1, CHUNK // np.maximum(width, 1)))


@lru_cache(maxsize=256)
def _tiles(shapes: bytes) -> tuple[Table, Table, Table, Table]:
    """Of each tensor (strips, pieces) of a matrix; chunks of tiles; where each tensor's sums of pieces and strips begin."""
    table = np.frombuffer(shapes, dtype=np.int64).reshape(-1, 3)
    count, rows, width = table.T
    strips, pieces = -(-rows // STRIP), -(-width // PIECE)
    tiles = np.stack([strips, pieces], axis=1)
    size = np.maximum(1, np.minimum(rows, STRIP) * np.minimum(width, PIECE))
    chunks = _cut(count * strips * pieces, np.maximum(1, CHUNK // size))
    return tiles, chunks, starts(count * rows * pieces), starts(count * strips * width)


def _cut(counts: Table, sizes: Table) -> Table:
    """Rows of (tensor, start, stop) that cut each tensor's count into pieces of its size."""
    per_tensor = -(-counts // sizes)
    tensor = np.repeat(np.arange(len(counts)), per_tensor)
    first = np.cumsum(per_tensor) - per_tensor
    start = (np.arange(len(tensor)) - first[tensor]) * sizes[tensor]
    return np.stack([tensor, start, np.minimum(start + sizes[tensor], counts[tensor])], axis=1)
