"""Numbers that are the same bits everywhere: integers, divided by a power of two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BIG_SEED = 2**64 - 59

_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}


def numbers(shape: Sequence[int], key: int, dtype: torch.dtype) -> Tensor:
    """Multiples, held by the dtype exactly, of a power of two in [-2, 2); a function of the key and the index."""
    if dtype == torch.complex64:
        return torch.view_as_complex(numbers((*shape, 2), key, torch.float32))
    digits = _DIGITS[dtype]
    x = (torch.arange(1, math.prod(shape) + 1) + 1000003 * key) * 0x9E3779B1 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    x = (x ^ x >> 12) >> 32 - digits
    return ((x - (1 << digits - 1)).double() / (1 << digits - 2)).to(dtype).view(tuple(shape))


def special() -> Tensor:
    """fp32 numbers of every exponent, both signs and several significands: zeros, subnormals, infinities, NaNs.

    Among them are ties of each format, between an even and an odd neighbour both ways.
    """
    ties = [(half, 3 * half) for half in (1 << 12, 1 << 15, 1 << 19, 1 << 20)]
    significands = [0, 1, *sum(ties, ()), 0x7FFF, 0x8001, 0x3FFFFF, 0x400000, 0x7EFFFF, 0x7F0000, 0x7FFFFF]
    codes = torch.arange(512).view(-1, 1) << 23 | torch.tensor(significands)
    codes = torch.where(codes < 1 << 31, codes, codes - (1 << 32))
    return codes.to(torch.int32).view(-1).view(torch.float32)


def every(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a dtype of 8 or 16 bits."""
    bits, kind = (8, torch.uint8) if dtype.itemsize == 1 else (16, torch.int16)
    return torch.arange(1 << bits).to(kind).view(dtype)


def some(dtype: torch.dtype, count: int) -> Tensor:
    """So many numbers of a dtype that come from everywhere among :func:`every` or, for fp32, :func:`special`."""
    found = special() if dtype == torch.float32 else every(dtype)
    chosen = torch.arange(count) * 7919 % len(found)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return found.view(kind)[chosen].view(dtype)
