"""An infinite or NaN weight stays as it is, to the bit, on every backend of the CPU; its states go on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import bits, same_bits
from tests.models import generator


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("shift", [0, 1])  # both halves of a pair
def test_nonfinite_weights_stay(backend: str, shift: int) -> None:
    """Decay would make Inf - Inf of an infinity; arithmetic would quiet a NaN or change its payload."""
    codes = [0x7F80, -0x80, 0x7FC0, 0x7F81, -1]  # both infinities, NaN: quiet, signalling, of the largest payload
    start = torch.ones(len(codes) + 11, dtype=torch.bfloat16)
    start[shift : shift + len(codes)] = torch.tensor(codes, dtype=torch.int16).view(torch.bfloat16)
    p = Parameter(start.clone())
    opt = subulp.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.5, backend=backend)
    for step in range(3):
        p.grad = torch.randn(p.shape, generator=generator(step)).bfloat16()
        opt.step()
    kept = ~start.isfinite()
    assert same_bits(p.detach()[kept], start[kept])
    assert (bits(p)[~kept] != bits(start)[~kept]).all()
    assert p.detach()[~kept].isfinite().all()
    assert (bits(opt.state[p]["momentum_buffer"]) != 0).all()
