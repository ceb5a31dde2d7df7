"""What a storage format is: how an fp32 value becomes stored bits, given a draw, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Formula = Callable[..., Any]


@dataclass(frozen=True)
class Codec:
    """A storage format.

    Its functions are formulas over fp32 numbers and words (``subulp.formula.ops``), compiled by every backend. A *code* is
    the stored form of a number, in the low ``bits`` bits of a word.

    Specials, in every format: a NaN stays a NaN and keeps its sign; an infinity stays one (NaN where the format has none); a
    finite value stays finite (it saturates); representable values, -0.0 included, are fixed points. Rounding to nearest is
    IEEE (ties to even, overflow to infinity), as ``Tensor.to``.
    """

    name: str
    dtype: torch.dtype
    bits: int
    """Of a code: 8, 16 or 32."""
    draw_bits: int
    """Random bits that a rounding needs: 0 (every fp32 number is exact), 16 or 32."""
    decode: Formula
    """``decode(code) -> number``."""
    encode: Formula
    """``encode(number, draw) -> code``, rounded stochastically; the draw has ``draw_bits`` uniform bits."""
    nearest: Formula
    """``nearest(number) -> code``."""
    quiet: Formula | None = None
    """Applied first to numbers that no arithmetic has touched, where ``encode`` takes no signalling NaN."""
    keeps_specials: bool = False
    """Whether ``encode(decode(code), draw)`` is the code of every infinity and NaN, to the bit."""
