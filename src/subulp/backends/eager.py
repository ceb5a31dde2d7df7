"""The reference backend: plain torch operations, on any device, in chunks that bound the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subulp.backends.job import Job
from subulp.numerics import noise
from subulp.numerics.formats import FORMATS, encode_nearest, encode_stochastic
from subulp.rules.rule import Rule

CHUNK = 1 << 18
"""Elements updated at a time: about 30 temporaries of 1 MiB."""


def run(rule: Rule, jobs: Sequence[Job], *, seed: int, stochastic: bool, grad_factor: float = 1.0) -> None:
    """Updates every job's tensors in place."""
    for job in jobs:
        views = job.views
        numel = views.written[0].numel()
        for start in range(0, numel, CHUNK):
            _update_chunk(rule, job, start, min(start + CHUNK, numel), seed, stochastic, grad_factor)
        views.finish()


def _update_chunk(
    rule: Rule, job: Job, start: int, stop: int, seed: int, stochastic: bool, grad_factor: float
) -> None:
    written = [t[start:stop] for t in job.views.written]
    double = written[0].dtype == torch.float64
    compute = torch.float64 if double else torch.float32
    scalars = job.scalars if double else tuple(float(np.float32(s)) for s in job.scalars)
    reads = [t[start:stop].to(compute) for t in job.views.reads]
    if grad_factor != 1.0:
        reads[0] = reads[0] * grad_factor
    old = [t.to(compute) for t in written]
    new = list(rule.formula(old[0], *reads, *old[1:], *scalars))
    index: Tensor | None = None
    for slot, (target, value) in enumerate(zip(written, new, strict=True)):
        fmt = FORMATS.get(target.dtype)
        if fmt is None:
            encoded = value
        elif stochastic:
            if index is None:
                index = job.views.layout.indices(start, stop, target.device)
            encoded = encode_stochastic(
                value.float(), fmt, _draws(index, seed, job.stream, job.step, slot)
            )
        else:
            encoded = encode_nearest(value.float(), fmt)
        if slot == 0 and rule.keeps_nonfinite:
            encoded = torch.where(old[0].isfinite(), encoded, target)
        target.copy_(encoded)


def _draws(index: Tensor, seed: int, stream: int, step: int, slot: int):  # type: ignore[no-untyped-def]
    def draw(wide: bool) -> Tensor:
        kind = noise.wide_draw if wide else noise.narrow_draw
        return kind(index, seed, stream, step, slot)

    return draw
