"""The reference backend: plain torch operations, on any device, in chunks that bound the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.numerics import noise
from subulp.numerics.formats import FORMATS, Draw, encode_nearest, encode_stochastic
from subulp.numerics.layout import Layout
from subulp.rules.rule import Rule

NAME = "eager"
READS_DEVICE_STEPS = False

CHUNK = 1 << 18
"""Elements updated at a time: about 30 temporaries of 1 MiB."""


def run(rule: Rule, bucket: Bucket, *, seed: int, stochastic: bool, read_factor: float = 1.0) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``."""
    for i, layout in enumerate(bucket.layouts):
        written = [column[i].view(-1) for column in bucket.written]
        reads = [column[i].view(-1) for column in bucket.reads]
        scalars = bucket.scalars[bucket.rows[i]].tolist()
        key = (seed, bucket.streams[i], int(bucket.steps[i]))
        numel = written[0].numel()
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            index = _indices(layout, start, stop, written[0].device) if stochastic else None
            _update(
                rule,
                [t[start:stop] for t in written],
                [t[start:stop] for t in reads],
                scalars,
                index,
                key,
                read_factor,
            )
    for views in bucket.views:
        views.finish()


def _indices(layout: Layout | None, start: int, stop: int, device: torch.device) -> Tensor:
    if layout is None:
        return torch.arange(start, stop, device=device)
    return layout.indices(start, stop, device)


def _update(
    rule: Rule,
    written: list[Tensor],
    reads: list[Tensor],
    scalars: Sequence[float],
    index: Tensor | None,
    key: tuple[int, int, int],
    read_factor: float,
) -> None:
    double = written[0].dtype == torch.float64
    compute = torch.float64 if double else torch.float32
    if not double:
        scalars = [float(np.float32(s)) for s in scalars]
    values = [t.to(compute) for t in reads]
    if read_factor != 1.0:
        values[0] = values[0] * read_factor
    old = [t.to(compute) for t in written]
    new = rule.formula(old[0], *values, *old[1:], *scalars)
    for slot, (target, value) in enumerate(zip(written, new, strict=True)):
        fmt = FORMATS.get(target.dtype)
        if fmt is None:
            encoded = value.to(target.dtype)
        elif index is None:
            encoded = encode_nearest(value.float(), fmt)
        else:
            encoded = encode_stochastic(value.float(), fmt, _draw(index, *key, slot))
        if slot == 0 and rule.keeps_nonfinite:
            encoded = torch.where(old[0].isfinite(), encoded, target)
        target.copy_(encoded)


def _draw(index: Tensor, seed: int, stream: int, step: int, slot: int) -> Draw:
    def draw(wide: bool) -> Tensor:
        kind = noise.wide_draw if wide else noise.narrow_draw
        return kind(index, seed, stream, step, slot)

    return draw


def record_update(
    rule: Rule, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[float], maximize: bool
) -> None:
    """The update as autograd sees it: the formula on the tensors themselves, in their own precision."""
    with torch.enable_grad():
        tensors = [torch.view_as_real(t) if t.is_complex() else t for t in (*written, -grad if maximize else grad)]
        target, *states, g = tensors
        for t, value in zip(tensors, rule.formula(target, g, *states, *scalars), strict=False):
            t.copy_(value)
