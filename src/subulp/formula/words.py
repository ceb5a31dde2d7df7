"""Numbers modulo 2**32 as the reference backend computes them: Python ints, or tensors of any device.

Noise and encoders (``subulp.formula.noise``, ``subulp.storage``) are written once over such numbers. Numba and Triton compile
the same functions over 32-bit registers; here int32 holds the bits, since torch has uint32 arithmetic on few devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
_SIGN = 0x80000000


def signed(x: int) -> int:
    """The int32 with the bits of ``x``, an int in [0, 2**32)."""
    return x - (1 << 32) if x & _SIGN else x


class Word:
    """A number modulo 2**32, or a tensor of them.

    ``bits`` is an int in [0, 2**32) or an int32 tensor. Operators are those of unsigned numbers; the other may be an int.
    """

    __slots__ = ("bits",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, bits: int | Tensor) -> None:
        self.bits = bits

    def integers(self) -> Any:
        """The numbers themselves: an int, or an int64 tensor."""
        return self.bits if isinstance(self.bits, int) else self.bits.to(torch.int64) & MASK

    def _with(self, other: Word | int, operate: Callable[[Any, Any], Any]) -> Word:
        a, b = self.bits, other.bits if isinstance(other, Word) else other & MASK
        if isinstance(a, int) and isinstance(b, int):
            return Word(operate(a, b) & MASK)
        return Word(operate(signed(a) if isinstance(a, int) else a, signed(b) if isinstance(b, int) else b))

    def _compared(self, other: Word | int, compare: Callable[[Any, Any], Any]) -> Any:
        a, b = self.bits, other.bits if isinstance(other, Word) else other & MASK
        if isinstance(a, int) and isinstance(b, int):
            return compare(a, b)
        # Order of unsigned numbers is that of the signed ones with the sign bit flipped.
        flipped = [signed(x ^ _SIGN) if isinstance(x, int) else x ^ signed(_SIGN) for x in (a, b)]
        return compare(*flipped)

    def __add__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: int) -> Word:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a * b)

    def __and__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a & b)

    def __or__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a | b)

    def __xor__(self, other: Word | int) -> Word:
        return self._with(other, lambda a, b: a ^ b)

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__

    def __lshift__(self, n: Word | int) -> Word:
        return self._with(n, lambda a, b: a << b)

    def __rshift__(self, n: Word | int) -> Word:
        a, b = self.bits, n.bits if isinstance(n, Word) else n
        if isinstance(a, Tensor) and isinstance(b, int):
            return Word((a >> b) & (MASK >> b)) if b else self
        shifted = self.integers() >> b
        return Word(shifted if isinstance(shifted, int) else shifted.to(torch.int32))

    def __lt__(self, other: Word | int) -> Any:
        return self._compared(other, lambda a, b: a < b)

    def __le__(self, other: Word | int) -> Any:
        return self._compared(other, lambda a, b: a <= b)

    def __gt__(self, other: Word | int) -> Any:
        return self._compared(other, lambda a, b: a > b)

    def __ge__(self, other: Word | int) -> Any:
        return self._compared(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> Any:
        return self._compared(other, lambda a, b: a == b)  # type: ignore[arg-type]


def chosen(condition: Any, a: Word | int, b: Word | int) -> Word:
    """``a`` where the condition (a bool or a tensor of them) holds, else ``b``."""
    if isinstance(condition, bool):
        picked = a if condition else b
        return picked if isinstance(picked, Word) else Word(picked & MASK)
    sides: list[Any] = []
    for x in (a, b):
        bits = x.bits if isinstance(x, Word) else x & MASK
        if isinstance(bits, int):
            bits = torch.tensor(signed(bits), dtype=torch.int32, device=condition.device)
        sides.append(bits)
    return Word(torch.where(condition, sides[0], sides[1]))
