"""A matrix updated with a factor for each row and each column, in the one native call of ``launch``.

Every row is a tensor of the bucket: the factors of its row are scalars, and those of the columns are tensors that all rows
read. So the update of Adafactor and CAME needs no temporary of the matrix's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.numba.launch import Launch
from subulp.formula.rule import Rule
from subulp.storage import CODECS
from subulp.torch_internals import mark_written

NARROW = 128
"""Rows with fewer elements cost more to look up than the temporaries do."""

KEPT = 1 << 14
"""Tables of more rows are not kept: they would take megabytes."""


def can_serve(written: Sequence[Tensor], reads: Sequence[Tensor]) -> bool:
    """Whether these tensors on the CPU can go row by row."""
    return written[0].numel() > 0 and all(
        t.dim() == 2 and t.shape[1] >= NARROW and t.is_contiguous() and t.dtype in CODECS for t in (*written, *reads)
    )


def run(
    rule: Rule,
    written: Sequence[Tensor],
    reads: Sequence[Tensor],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    *,
    columns: int,
    offset: tuple[int, int],
    stream: int,
    step: int,
    seed: int,
    stochastic: bool | tuple[bool, ...],
    factor: float,
) -> None:
    """Updates ``written`` (rows, width) in place.

    ``factors`` are those by row (fp32, rows) and by column (fp32, width).
    ``columns`` is the width of the whole matrix and ``offset`` where this block begins in it.
    """
    rows, width = written[0].shape
    matrices = [*written, *reads]
    by_col = [factors[name] for name in rule.by_col]
    dtypes = (*(t.dtype for t in matrices), *(t.dtype for t in by_col))
    tables = _tables if rows <= KEPT else _tables.__wrapped__
    launch, number = tables(rule, dtypes, stochastic, (rows, width), columns, offset)
    pointers = np.empty((rows, len(dtypes)), dtype=np.int64)
    for c, t in enumerate(matrices):
        pointers[:, c] = t.data_ptr() + number * (width * t.element_size())
    for c, t in enumerate(by_col, len(matrices)):
        pointers[:, c] = t.data_ptr()
    table = np.empty((rows, len(rule.by_row) + len(rule.scalars)))
    for c, name in enumerate(rule.by_row):
        table[:, c] = factors[name].numpy()
    table[:, len(rule.by_row) :] = rule.ordered(scalars)
    streams, steps = (np.full(rows, value, dtype=np.int64) for value in (stream, step))
    launch(pointers, table, number, streams, steps, seed, factor)
    mark_written(written)


@lru_cache(maxsize=64)
def _tables(
    rule: Rule,
    dtypes: tuple[torch.dtype, ...],
    stochastic: bool | tuple[bool, ...],
    shape: tuple[int, int],
    columns: int,
    offset: tuple[int, int],
) -> tuple[Launch, npt.NDArray[np.int64]]:
    """The launch for matrices of a shape, without streams, and the numbers of its rows."""
    rows, width = shape
    launch = Launch(rule.by_rows(), dtypes, stochastic, [width] * rows, ())
    number = np.arange(rows, dtype=np.int64)
    launch.layouts[:, 0] = (offset[0] + number) * columns + offset[1]
    return launch, number
