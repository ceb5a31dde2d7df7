"""The named functions that formulas may use besides ``+ - *`` and comparisons: their meaning on torch tensors.

A formula is a plain function over fp32 numbers, or over these and *words* (numbers modulo 2**32, which have ``& | ^ << >>``
too). It is written once: here the names act on tensors; Numba and Triton compile the same function object with the first
group bound to instructions (:data:`PRIMITIVES`), and must give the same bits. So each is exactly rounded: no fused
multiply-add, no approximate division or square root. Shifts are by less than 32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subulp.formula.words import MASK, Word, chosen


def div(a: Tensor | float, b: Tensor) -> Tensor:
    """Correctly rounded ``a / b``."""
    return a / b


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root.

    torch's vectorised fp32 square root on CPU is an ulp off for about 20 % of its inputs; the fp64 root rounded to fp32
    is exact, because 53 >= 2 * 24 + 2 bits make the double rounding harmless.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return x.double().sqrt().float()
    return x.sqrt()


def absolute(x: Tensor) -> Tensor:
    """``|x|``, by clearing the sign bit."""
    return x.abs()


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``: numbers or words. Of two literals, ints are words and floats numbers."""
    if isinstance(a, Word) or isinstance(b, Word) or (isinstance(a, int) and isinstance(b, int)):
        return chosen(condition, a, b)
    return torch.where(condition, a, b)


def bits_of(x: Tensor) -> Word:
    """The bits of an fp32 number, as a word."""
    return Word(x.view(torch.int32))


def number_of(bits: Word) -> Tensor:
    """The fp32 number with these bits."""
    if isinstance(bits.bits, int):
        raise TypeError("number_of() takes a word that is a tensor.")
    return bits.bits.view(torch.float32)


def high_product(a: Word, b: int) -> Word:
    """The upper 32 bits of the 64-bit product."""
    x = a.integers()
    # In halves, since a product of two words overflows int64.
    low = (x & 0xFFFF) * b
    high = (x >> 16) * b
    result = (high + (low >> 16)) >> 16
    return Word(result if isinstance(result, int) else (result & MASK).to(torch.int32))


def high_sum(x: Tensor, word: Word) -> Word:
    """The upper 32 bits of the 64-bit sum of ``x``, a number in [0, 2**54) cut to an integer, and the word."""
    return Word(((x.to(torch.int64) + word.integers()) >> 32).to(torch.int32))


def half_of(x: Tensor) -> Word:
    """The bits of ``x``, not a NaN, in IEEE half precision, rounded to nearest, ties to even: a word below 2**16."""
    return Word(x.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF)


def number_of_half(bits: Word) -> Tensor:
    """The fp32 number with these bits in IEEE half precision."""
    return _narrow(bits, torch.int16).view(torch.float16).to(torch.float32)


def _narrow(code: Word, carrier: torch.dtype) -> Tensor:
    t: Any = code.bits
    if carrier == torch.int16:
        # Folded to its range: the cast of what lies outside is not defined everywhere.
        t = ((t + 0x8000) & 0xFFFF) - 0x8000
    result: Tensor = t.to(carrier)
    return result


def repeat(times: int) -> range:
    """What a loop of a fixed number of rounds runs over."""
    return range(times)


PRIMITIVES: tuple[Callable[..., Any], ...] = (
    div,
    sqrt,
    absolute,
    where,
    bits_of,
    number_of,
    high_product,
    high_sum,
    half_of,
    number_of_half,
    repeat,
)
"""What every backend binds. The functions below are formulas themselves."""


def maximum(a, b):
    """The larger of the two; NaN if either is NaN, the first of them."""
    return where((a > b) | (a != a), a, b)


def sign(x):
    """-1, +1, or ``x`` itself where it is a zero or a NaN."""
    return where(x > 0, 1.0, where(x < 0, -1.0, x))
