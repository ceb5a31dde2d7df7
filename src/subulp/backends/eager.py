"""The reference backend: plain torch operations, on any device, in chunks that bound the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.formula import noise
from subulp.formula.rule import Rule, slots
from subulp.numerics.formats import FORMATS, Draw, encode_nearest, encode_stochastic
from subulp.numerics.layout import Layout

NAME = "eager"
READS_DEVICE_STEPS = False

CHUNK = 1 << 18
"""Elements updated at a time: about 30 temporaries of 1 MiB."""


def run(
    rule: Rule, bucket: Bucket, *, seed: int, stochastic: bool | tuple[bool, ...], read_factor: float = 1.0
) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``."""
    drawn = slots(stochastic, len(bucket.written))
    for i, layout in enumerate(bucket.layouts):
        written = [column[i].view(-1) for column in bucket.written]
        reads = [column[i].view(-1) for column in bucket.reads]
        compute = torch.float64 if written[0].dtype == torch.float64 else torch.float32
        # Tensors, so that what a formula computes of scalars alone is rounded as the kernels round it.
        scalars = [torch.tensor(scalar, dtype=compute) for scalar in bucket.scalars[bucket.rows[i]].tolist()]
        key = (seed, bucket.streams[i], int(bucket.steps[i]))
        numel = written[0].numel()
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            index = _indices(layout, start, stop, written[0].device) if any(drawn) else None
            _update(
                rule,
                [t[start:stop] for t in written],
                [t[start:stop] for t in reads],
                scalars,
                index,
                key,
                drawn,
                read_factor,
            )
    bucket.finish()


def _indices(layout: Layout | None, start: int, stop: int, device: torch.device) -> Tensor:
    if layout is None:
        return torch.arange(start, stop, device=device)
    return layout.indices(start, stop, device)


def _update(
    rule: Rule,
    written: list[Tensor],
    reads: list[Tensor],
    scalars: Sequence[Tensor],
    index: Tensor | None,
    key: tuple[int, int, int],
    drawn: tuple[bool, ...],
    read_factor: float,
) -> None:
    compute = torch.float64 if written[0].dtype == torch.float64 else torch.float32
    values = [t.to(compute) for t in reads]
    if read_factor != 1.0:
        values[0] = values[0] * read_factor
    old = [t.to(compute) for t in written]
    new = rule.formula(old[0], *values, *old[1:], *scalars)
    for slot, (target, value) in enumerate(zip(written, new, strict=True)):
        fmt = FORMATS.get(target.dtype)
        if fmt is None:
            encoded = value.to(target.dtype)
        elif index is None or not drawn[slot]:
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


def record_update(rule: Rule, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[Any]) -> None:
    """The update as autograd sees it: the formula on the tensors themselves, in their own precision.

    It works on copies of what it overwrites, whose old values the backward pass needs. Scalars may be tensors.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in (*written, grad)]
    g, (old, *states) = tensors[-1], [t.clone() for t in tensors[:-1]]
    for t, value in zip(tensors, rule.formula(old, g, *states, *scalars), strict=False):
        t.copy_(value)
