"""Sums of quantities and updates with factors, the reference of every backend: torch's operations, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from subulp.backends.eager import codec_for, load, update_elements
from subulp.backends.matrices import Matrices, Operand, scalar_table
from subulp.formula.rule import Quantity, Rule
from subulp.formula.sums import LANES, PIECE, STRIP
from subulp.storage.element import value_of

BLOCK = 1 << 18
"""Elements whose values are in memory at a time, or one strip of rows."""


def sums(
    quantity: Quantity,
    matrices: Matrices,
    over: Sequence[str],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """See ``subulp.backends.sums``."""
    parts: dict[str, list[Tensor]] = {name: [] for name in over}
    row_starts, col_starts = matrices.stacks.row_starts, matrices.stacks.col_starts
    values = quantity.ordered(scalars)
    for i, (count, rows, cols) in enumerate(matrices.stacks.shapes.tolist()):
        tensors = [matrices.columns[name][i].view(count, rows, cols) for name in quantity.reads]
        compute = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        by_col = [
            factors[name][col_starts[i] : col_starts[i + 1]].view(count, 1, cols).to(compute)
            for name in quantity.by_col
        ]
        by_row = [
            factors[name][row_starts[i] : row_starts[i + 1]].view(count, rows, 1).to(compute)
            for name in quantity.by_row
        ]
        own = [_number(v, i).to(tensors[0].device, compute) for v in values]
        codecs = tuple(codec_for(t.dtype, compute) for t in (*tensors, *by_col))
        value = value_of(quantity, codecs, factor != 1.0)
        scale = (torch.tensor(factor, dtype=compute),) if factor != 1.0 else ()
        row_sums, col_sums = [], []
        step = max(1, BLOCK // max(1, count * cols) // STRIP) * STRIP
        for first in range(0, rows, step):
            block = slice(first, first + step)
            codes = [load(t[:, block]) for t in tensors] + [load(t) for t in by_col]
            x = value(codes, [*(t[:, block] for t in by_row), *own], *scale).double()
            row_sums.append(sum_last(x))
            col_sums.append(_strip_sums(x) if "cols" in over else x)
        row = torch.cat(row_sums, 1) if row_sums else torch.zeros(count, rows, dtype=torch.float64)
        found = {"rows": row}
        if "cols" in over:
            found["cols"] = _sum_rows(torch.cat(col_sums, 1)) if col_sums else row.new_zeros(count, cols)
        if "all" in over:
            found["all"] = sum_last(row.view(1, -1))
        for name in over:
            parts[name].append(found[name].reshape(-1).to(matrices.device))
    return {name: torch.cat(part) for name, part in parts.items()}


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
    row_starts, col_starts = matrices.stacks.row_starts, matrices.stacks.col_starts
    table = scalar_table(rule.scalars, scalars, len(matrices))
    for i, layout in enumerate(matrices.stacks.layouts):
        _, rows, cols = matrices.stacks.shapes[i].tolist()
        by_col = [factors[name][col_starts[i] : col_starts[i + 1]] for name in rule.by_col]
        by_row = [factors[name][row_starts[i] : row_starts[i + 1]] for name in rule.by_row]

        def expanded(start: int, stop: int) -> list[Tensor]:
            position = torch.arange(start, stop, device=matrices.device)
            row, col = position // cols, position % cols  # noqa: B023  called before the next tensor
            return [t[row // rows * cols + col] for t in by_col] + [t[row] for t in by_row]  # noqa: B023

        columns = [column[i].view(-1) for column in matrices.columns.values()]
        key = (seed, matrices.stacks.streams[i], int(steps[i]))
        update_elements(rule.by_elements(), columns, layout, key, table[i].tolist(), stochastic, factor, expanded)


def _number(value: Operand, i: int) -> Tensor:
    return value[i] if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def sum_last(x: Tensor) -> Tensor:
    """Sums of fp64 numbers over the last dimension, in the order of ``subulp.formula.sums``."""
    if x.shape[-1] == 0:
        return x.sum(-1)
    while True:
        size = x.shape[-1]
        pieces = -(-size // PIECE)
        steps = -(-min(size, PIECE) // LANES)
        x = pad(x, (0, pieces * steps * LANES - size)).unflatten(-1, (pieces, steps, LANES))
        lanes = 0.0 + x[..., 0, :]
        for s in range(1, steps):
            lanes = lanes + x[..., s, :]
        while lanes.shape[-1] > 1:
            lanes = lanes[..., 0::2] + lanes[..., 1::2]
        x = lanes.squeeze(-1)
        if pieces == 1:
            return x.squeeze(-1)


def _strip_sums(x: Tensor) -> Tensor:
    """(matrices, rows, columns) to (matrices, strips, columns)."""
    strips = -(-x.shape[1] // STRIP)
    x = pad(x, (0, 0, 0, strips * STRIP - x.shape[1]))
    x = x.unflatten(1, (strips, STRIP))
    total = 0.0 + x[:, :, 0]
    for r in range(1, STRIP):
        total = total + x[:, :, r]
    return total


def _sum_rows(x: Tensor) -> Tensor:
    while x.shape[1] > 1:
        x = _strip_sums(x)
    return x.squeeze(1)
