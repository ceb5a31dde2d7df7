"""Sums over stacks of matrices, and updates with factors, on the GPU: a few launches for any number of tensors.

Nothing waits for the device. What follows from shapes is uploaded once and kept with them (``Stacks.memo``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subulp.backends.matrices import Matrices, Operand, Stacks, Table, starts
from subulp.backends.triton import matrix_kernel as kernels
from subulp.backends.triton.bindings import jitted
from subulp.backends.triton.kernel import constants, options, packed
from subulp.backends.triton.launch import on_device, warp_size
from subulp.backends.triton.tables import chunk_map, layout_table, upload
from subulp.formula.rule import Quantity, Rule
from subulp.formula.sums import PIECE, STRIP
from subulp.storage import CODECS
from subulp.storage.element import value_of
from subulp.torch_internals import mark_written

_FP32 = CODECS[torch.float32]


def sums(
    quantity: Quantity,
    matrices: Matrices,
    over: Sequence[str],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """See ``subulp.backends.sums``."""
    columns, stacks, device = [matrices.columns[name] for name in quantity.reads], matrices.stacks, matrices.device
    codecs = tuple(CODECS[column[0].dtype] for column in columns)
    scaled = factor != 1.0
    value = jitted(value_of(quantity, (*codecs, *[_FP32] * len(quantity.by_col)), scaled))
    shapes, per_row, per_col = stacks.shapes, -(-stacks.shapes[:, 2] // PIECE), -(-stacks.shapes[:, 1] // STRIP)
    piece_starts, strip_starts = starts(stacks.rows * per_row), starts(shapes[:, 0] * per_col * shapes[:, 2])
    fields = [shapes[:, 1:], stacks.rows[:, None], piece_starts[:-1, None], strip_starts[:-1, None]]
    table = np.concatenate([_addresses(columns, factors, quantity, stacks), *fields], axis=1)
    found: dict[str, Tensor] = {}
    with on_device(device):
        common = (upload(table, device), _scalars(quantity, scalars, len(matrices), device))
        specialised = {
            "VALUE": value,
            "SIZES": packed(codec.bits // 8 for codec in codecs),
            "COLUMNS": len(columns),
            "BY_COL": len(quantity.by_col),
            "BY_ROW": len(quantity.by_row),
            "SCALARS": len(quantity.scalars),
            "SCALED": scaled,
            **options(warp_size(device.type)),
        }

        def launch(kernel: Any, chunks: Tensor, size: int, **more: int) -> Tensor:
            result = torch.empty(size, dtype=torch.float64, device=device)
            if len(chunks):
                kernel[(len(chunks),)](common[0], chunks, common[1], result, factor, **specialised, **more)
            return result

        if "rows" in over or "all" in over:
            chunks = _kept(stacks, device, "pieces", lambda: _grid(stacks.rows, kernels.ROWS, per_row, 1))
            pieces = launch(kernels.sum_pieces, chunks, int(piece_starts[-1]), ROWS=kernels.ROWS)
            found["rows"] = _folded(stacks, device, "rows", pieces, np.repeat(per_row, stacks.rows))
        if "all" in over:
            found["all"] = _folded(stacks, device, "all", found["rows"], stacks.rows)
        if "cols" in over:
            chunks = _kept(
                stacks,
                device,
                "strips",
                lambda: _grid(shapes[:, 0] * per_col, 1, -(-shapes[:, 2] // kernels.COLS), kernels.COLS),
            )
            strips = launch(kernels.sum_strips, chunks, int(strip_starts[-1]), COLS=kernels.COLS)
            each = [np.repeat(values, shapes[:, 0]) for values in (per_col, shapes[:, 2])]
            found["cols"] = _folded_strips(stacks, device, strips, *each)
    return {name: found[name] for name in over}


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
    columns, stacks, device = list(matrices.columns.values()), matrices.stacks, matrices.device
    if not stacks.sizes.any():
        return
    codecs = tuple(CODECS[column[0].dtype] for column in columns)
    flat = rule.by_rows()
    layouts = layout_table(stacks.layouts, stacks.sizes)
    noise = np.zeros((len(matrices), 3), dtype=np.int64)
    noise[:, 0] = stacks.streams
    noise[:, 1] = np.uint64(seed).astype(np.int64)
    addresses = _addresses(columns, factors, rule, stacks)
    table = np.concatenate([addresses, layouts[:, :1], noise, layouts[:, 1:], stacks.shapes[:, 1:]], axis=1)
    slow = np.zeros(len(matrices), dtype=bool)
    specialised = constants(
        flat,
        (*codecs, *[_FP32] * len(rule.by_col)),
        (layouts.shape[1] - 1) // 2,
        stochastic,
        scaled=factor != 1.0,
    )
    names = ("UPDATE", "ENCODE", "SIZES", "DRAWS", "WORDS", "WRITTEN", "DIMS", "SCALED")
    with on_device(device):
        chunks = _kept(stacks, device, "update", lambda: chunk_map(stacks.sizes, slow, layouts))
        kernels.update_factored[(len(chunks),)](
            upload(table, device),
            chunks,
            upload(np.array(steps, dtype=np.int64), device),
            _scalars(rule, scalars, len(matrices), device),
            factor,
            **{name: specialised[name] for name in names},
            COLUMNS=len(columns),
            BY_COL=len(rule.by_col),
            BY_ROW=len(rule.by_row),
            SCALARS=len(rule.scalars),
            TILE=specialised["SINGLES"],
            **options(warp_size(device.type)),
        )
    mark_written(t for column in columns[: 1 + len(rule.states)] for t in column)


def _addresses(
    columns: Sequence[Sequence[Tensor]], factors: Mapping[str, Tensor], what: Quantity | Rule, stacks: Stacks
) -> Table:
    """(tensors, columns and factors): of the tensors, then of each tensor's segments of the factors by column and by row."""
    result = np.empty((len(stacks.shapes), len(columns) + len(what.by_col) + len(what.by_row)), dtype=np.int64)
    for c, column in enumerate(columns):
        result[:, c] = np.fromiter(map(Tensor.data_ptr, column), np.int64, len(column))
    named = [(name, stacks.col_starts) for name in what.by_col] + [(name, stacks.row_starts) for name in what.by_row]
    for c, (name, begins) in enumerate(named, len(columns)):
        result[:, c] = factors[name].data_ptr() + 4 * begins[:-1]
    return result


def _scalars(what: Quantity | Rule, values: Mapping[str, Operand], count: int, device: torch.device) -> Tensor:
    """fp32 (tensors, scalars), on the device; what is there is not read by the host."""
    columns = [
        v.to(torch.float32) if isinstance(v, Tensor) else torch.full((count,), v, dtype=torch.float32, device=device)
        for v in what.ordered(values)
    ]
    return torch.stack(columns, dim=1) if columns else torch.empty(count, 0, device=device)


def _kept(stacks: Stacks, device: torch.device, name: str, build: Callable[[], Table]) -> Tensor:
    key = f"triton {device} {name}"
    if key not in stacks.memo:
        stacks.memo[key] = upload(build(), device)
    kept: Tensor = stacks.memo[key]
    return kept


def _grid(outer: Table, outer_step: int, inner: Table, inner_step: int) -> Table:
    """(programs, 3): tensor, outer position, inner position, by steps."""
    per_outer = -(-outer // outer_step)
    tensor = np.repeat(np.arange(len(outer)), per_outer * inner)
    first = np.cumsum(per_outer * inner) - per_outer * inner
    place = np.arange(len(tensor)) - first[tensor]
    blocks = np.maximum(inner, 1)[tensor]
    return np.stack([tensor, place // blocks * outer_step, place % blocks * inner_step], axis=1)


def _folded(stacks: Stacks, device: torch.device, name: str, x: Tensor, sizes: Table) -> Tensor:
    """The sum of each of the vectors of these sizes that ``x`` consists of."""
    if (sizes == 1).all():
        return x
    level = 0
    while level == 0 or (sizes > 1).any():
        counts = np.maximum(1, -(-sizes // PIECE))
        chunks = _kept(stacks, device, f"{name} {level}", lambda: _pieces(sizes, counts))  # noqa: B023  called at once
        folded = torch.empty(int(counts.sum()), dtype=torch.float64, device=device)
        kernels.fold_pieces[(len(chunks),)](x, folded, chunks)
        x, sizes, level = folded, counts, level + 1
    return x


def _pieces(sizes: Table, counts: Table) -> Table:
    vector = np.repeat(np.arange(len(sizes)), counts)
    begins = starts(counts)
    offset = (np.arange(len(vector)) - begins[vector]) * PIECE
    size = np.minimum(sizes[vector] - offset, PIECE)
    return np.stack([starts(sizes)[vector] + offset, size, np.arange(len(vector))], axis=1)


def _folded_strips(stacks: Stacks, device: torch.device, x: Tensor, rows: Table, widths: Table) -> Tensor:
    """Of each matrix of these rows and widths that ``x`` consists of, the sums of its columns."""
    if (rows == 1).all():
        return x
    level = 0
    while level == 0 or (rows > 1).any():
        counts = np.maximum(1, -(-rows // STRIP))
        chunks = _kept(stacks, device, f"cols {level}", lambda: _strips(rows, widths, counts))  # noqa: B023  called at once
        folded = torch.empty(int((counts * widths).sum()), dtype=torch.float64, device=device)
        if len(chunks):
            kernels.fold_strips[(len(chunks),)](x, folded, chunks, COLS=kernels.COLS)
        x, rows, level = folded, counts, level + 1
    return x


def _strips(rows: Table, widths: Table, counts: Table) -> Table:
    grid = _grid(counts, 1, -(-widths // kernels.COLS), kernels.COLS)
    matrix, strip, column = grid.T
    begins = starts(rows * widths)[matrix] + strip * STRIP * widths[matrix]
    left = np.minimum(rows[matrix] - strip * STRIP, STRIP)
    into = starts(counts * widths)[matrix] + strip * widths[matrix]
    return np.stack([begins, left, widths[matrix], column, into], axis=1)
