"""The reference backend: plain torch operations, on any device, in chunks that bound the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.formula.rule import Rule, slots
from subulp.formula.words import Word
from subulp.numerics.draws import draw
from subulp.numerics.layout import Layout
from subulp.storage import CODECS
from subulp.storage.codec import Codec
from subulp.storage.element import element_of

NAME = "eager"
READS_DEVICE_STEPS = False

CHUNK = 1 << 18
"""Elements updated at a time: about 30 temporaries of 1 MiB."""

_CARRIERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def run(
    rule: Rule, bucket: Bucket, *, seed: int, stochastic: bool | tuple[bool, ...], read_factor: float = 1.0
) -> None:
    """Updates the bucket's written tensors in place. The first read tensor is multiplied by ``read_factor``."""
    for i, layout in enumerate(bucket.layouts):
        columns = [column[i].view(-1) for column in (*bucket.written, *bucket.reads)]
        scalars = bucket.scalars[bucket.rows[i]].tolist()
        key = (seed, bucket.streams[i], int(bucket.steps[i]))
        update_elements(rule, columns, layout, key, scalars, stochastic, read_factor)
    bucket.finish()


def update_elements(
    rule: Rule,
    columns: Sequence[Tensor],
    layout: Layout | None,
    key: tuple[int, int, int],
    scalars: Sequence[float],
    stochastic: bool | tuple[bool, ...],
    factor: float,
    more: Callable[[int, int], list[Tensor]] = lambda start, stop: [],
) -> None:
    """The update of one tensor's flat columns; ``more`` gives the elements from start to stop of further ones."""
    compute = torch.float64 if columns[0].dtype == torch.float64 else torch.float32
    codecs = tuple(codec_for(t.dtype, compute) for t in (*columns, *more(0, 0)))
    scaled = factor != 1.0
    element = element_of(rule, codecs, slots(stochastic, 1 + len(rule.states)), scaled)
    # Tensors, so that what a formula computes of scalars alone is rounded as the kernels round it.
    values = [torch.tensor(scalar, dtype=compute) for scalar in scalars]
    factors = (torch.tensor(factor, dtype=compute),) if scaled else ()
    numel = columns[0].numel()
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        parts = [t[start:stop] for t in columns]
        index = _indices(layout, start, stop, columns[0].device) if any(element.draws) else None
        codes = list(map(load, [*parts, *more(start, stop)]))
        numbers = element.update(codes, values, *factors)
        for slot, (number, bits) in enumerate(zip(numbers, element.draws, strict=True)):
            drawing = draw(index, *key, slot, bits) if index is not None and bits else None
            store(parts[slot], element.encode(slot, number, drawing, codes[slot]))


def _indices(layout: Layout | None, start: int, stop: int, device: torch.device) -> Tensor:
    if layout is None:
        return torch.arange(start, stop, device=device)
    return layout.indices(start, stop, device)


def load(t: Tensor) -> Any:
    """The codes of a tensor; of an fp64 one the tensor itself."""
    if t.dtype == torch.float64:
        return t
    bits = 8 * t.element_size()
    code = t.view(_CARRIERS[bits])
    return Word(code if bits == 32 else code.to(torch.int32) & ((1 << bits) - 1))


def store(t: Tensor, code: Any) -> None:
    """Writes codes into a tensor; into an fp64 one numbers."""
    if t.dtype == torch.float64:
        t.copy_(code)
        return
    bits = 8 * t.element_size()
    raw = code.bits
    if bits == 16:
        # Folded to int16's range: the cast of what lies outside is not defined everywhere.
        raw = ((raw + 0x8000) & 0xFFFF) - 0x8000
    t.view(_CARRIERS[bits]).copy_(raw)


@cache
def codec_for(dtype: torch.dtype, compute: torch.dtype) -> Codec:
    """The format of a column when formulas are computed in ``compute``."""
    if dtype == torch.float64:
        return Codec("fp64", dtype, 64, 0, lambda t: t.to(compute), _unrounded, lambda x: x.double())
    codec = CODECS[dtype]
    if compute == torch.float32:
        return codec
    return replace(
        codec,
        decode=lambda code: codec.decode(code).double(),
        encode=lambda x, draw: codec.encode(x.float(), draw),
        nearest=lambda x: codec.nearest(x.float()),
    )


def _unrounded(x: Tensor, draw: Any) -> Tensor:
    return x.double()


def record_update(rule: Rule, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[Any]) -> None:
    """The update as autograd sees it: the formula on the tensors themselves, in their own precision.

    It works on copies of what it overwrites, whose old values the backward pass needs. Scalars may be tensors.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in (*written, grad)]
    g, (old, *states) = tensors[-1], [t.clone() for t in tensors[:-1]]
    for t, value in zip(tensors, rule.formula(old, *states, g, *scalars), strict=False):
        t.copy_(value)
