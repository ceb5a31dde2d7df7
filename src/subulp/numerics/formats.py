"""Storage formats: how an fp32 value becomes 16 or 8 bits, given the draw.

*Narrow* (bf16): the draw is added below the kept half and the sum is cut, ``(bits + r16) >> 16``, so that
``P(up) = dropped / 2**16`` exactly, in every binade and in the subnormals (docs/noise.md).
*Wide* (fp16, float8): the dropped part has up to 140 bits. It is aligned to a 32-bit fraction and a 32-bit draw is
added, so ``P(up)`` is exact to ``2**-32`` ulp (exactly unbiased wherever the fraction has at most 32 bits).

Specials, in every format: a NaN stays a NaN and keeps its sign; an infinity stays one (NaN in float8_e4m3fn, which has
no infinity); a finite value stays finite (it saturates); representable values, -0.0 included, are fixed points.
Rounding to nearest is IEEE (ties to even, overflow to infinity), as ``Tensor.to``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point storage format of at most 16 bits, described by its bits."""

    dtype: torch.dtype
    carrier: torch.dtype
    mantissa_bits: int
    min_exponent: int
    """fp32's biased exponent of the smallest normal value."""
    max_code: int
    """Magnitude bits of the largest finite value."""
    inf_code: int
    """Magnitude bits of infinity (of NaN where the format has none)."""
    nan_code: int
    sign_shift: int
    wide: bool


BF16 = Format(torch.bfloat16, torch.int16, 7, 1, 0x7F7F, 0x7F80, 0x7FC0, 16, wide=False)
FP16 = Format(torch.float16, torch.int16, 10, 113, 0x7BFF, 0x7C00, 0x7E00, 16, wide=True)
E4M3 = Format(torch.float8_e4m3fn, torch.uint8, 3, 121, 0x7E, 0x7F, 0x7F, 24, wide=True)
E5M2 = Format(torch.float8_e5m2, torch.uint8, 2, 113, 0x7B, 0x7C, 0x7E, 24, wide=True)

FORMATS = {f.dtype: f for f in (BF16, FP16, E4M3, E5M2)}

Draw = Callable[[bool], Tensor]
"""Gives the draws of a tensor: ``draw(wide)`` is 16 bits in int32 for False, 32 bits in int64 for True."""


def encode_stochastic(x: Tensor, fmt: Format, draw: Draw) -> Tensor:
    """``x`` (fp32) rounded stochastically to the format."""
    if fmt.wide:
        return _encode_wide(x, fmt, draw(True))
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # From 0x7F7F0000 on a carry would turn a finite value into Inf, and Inf or NaN into something else.
    rounded = bits + torch.where(magnitude < 0x7F7F0000, draw(False), 0)
    quiet = torch.where(magnitude > 0x7F800000, 0x00400000, 0)
    return ((rounded | quiet) >> 16).to(torch.int16).view(torch.bfloat16)


def encode_nearest(x: Tensor, fmt: Format) -> Tensor:
    """``x`` (fp32) rounded to nearest, ties to even."""
    if fmt.dtype != torch.bfloat16:
        return x.to(fmt.dtype)
    # torch's own conversion drops the sign of a NaN on some paths; the kernels do exactly this.
    bits = x.view(torch.int32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = torch.where(nan, bits | 0x00400000, bits + (0x7FFF + ((bits >> 16) & 1)))
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def _encode_wide(x: Tensor, fmt: Format, draw: Tensor) -> Tensor:
    bits = x.view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    mantissa = torch.where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    exponent = exponent.clamp(min=1)
    shift = (23 - fmt.mantissa_bits) + (fmt.min_exponent - exponent).clamp(min=0)
    kept_and_fraction = (mantissa << 32) >> shift.clamp(max=63)
    code = ((kept_and_fraction + draw) >> 32) + ((exponent - fmt.min_exponent).clamp(min=0) << fmt.mantissa_bits)
    code = code.clamp(max=fmt.max_code)
    code = torch.where(magnitude == 0x7F800000, fmt.inf_code, code)
    code = torch.where(magnitude > 0x7F800000, fmt.nan_code, code)
    code = code | ((bits & 0x80000000) >> fmt.sign_shift)
    if fmt.carrier == torch.int16:
        code = torch.where(code >= 0x8000, code - 0x10000, code)
    return code.to(fmt.carrier).view(fmt.dtype)
