"""Formulas as LLVM instructions: called with stand-ins for numbers and words that emit what is done to them.

So a formula is compiled without Numba's typing, in which uint32 + uint32 is 64 bits wide and a literal is fp64: here a word
is 32 bits, a number is fp32, and a literal is a constant of the type of the other operand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from subulp.formula import ops
from subulp.formula.bind import bind
from subulp.formula.ops import PRIMITIVES

WORD = ir.IntType(32)
FLOAT = ir.FloatType()
_HALF = ir.HalfType()


class Traced:
    """A value of the function that ``builder`` is writing."""

    __slots__ = ("builder", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    def _constant(self, literal: Any) -> Any:
        raise NotImplementedError

    def _other(self, other: Any) -> Any:
        if isinstance(other, Traced):
            if type(other) is not type(self):
                raise TypeError(
                    f"A {type(self).__name__} meets a {type(other).__name__}: use bits_of() or number_of()."
                )
            return other.value
        return self._constant(other)

    def _compare(self, how: str, other: Any) -> Truth:
        raise NotImplementedError

    def __lt__(self, other: Any) -> Truth:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Truth:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Truth:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Truth:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)


class Truth(Traced):
    """A condition."""

    __slots__ = ()

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.builder, self.builder.and_(self.value, self._other(other)))

    def __or__(self, other: Truth) -> Truth:
        return Truth(self.builder, self.builder.or_(self.value, self._other(other)))


class Word(Traced):
    """A number modulo 2**32; ``small``: known to be below 2**31."""

    __slots__ = ("small",)

    def __init__(self, builder: Any, value: Any, small: bool = False) -> None:
        super().__init__(builder, value)
        self.small = small

    def _constant(self, literal: Any) -> Any:
        return WORD(int(literal) & 0xFFFFFFFF)

    def _compare(self, how: str, other: Any) -> Truth:
        small = self.small and (other.small if isinstance(other, Word) else 0 <= other < 1 << 31)
        # x86 before AVX-512 compares vectors of signed numbers only, and LLVM forgets that these are small.
        compare = self.builder.icmp_signed if small else self.builder.icmp_unsigned
        return Truth(self.builder, compare(how, self.value, self._other(other)))

    def __add__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.add(self.value, self._other(other)))

    def __sub__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.sub(self.value, self._other(other)))

    def __rsub__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.sub(self._other(other), self.value))

    def __mul__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.mul(self.value, self._other(other)))

    def __and__(self, other: Any) -> Word:
        small = self.small or (other.small if isinstance(other, Word) else other < 1 << 31)
        return Word(self.builder, self.builder.and_(self.value, self._other(other)), small)

    def __or__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.or_(self.value, self._other(other)))

    def __xor__(self, other: Any) -> Word:
        return Word(self.builder, self.builder.xor(self.value, self._other(other)))

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__

    def __lshift__(self, n: Any) -> Word:
        return Word(self.builder, self.builder.shl(self.value, self._other(n)))

    def __rshift__(self, n: Any) -> Word:
        return Word(self.builder, self.builder.lshr(self.value, self._other(n)), self.small or isinstance(n, int))


class Number(Traced):
    """An fp32 number."""

    __slots__ = ()

    def _constant(self, literal: Any) -> Any:
        return FLOAT(float(literal))

    def _compare(self, how: str, other: Any) -> Truth:
        compare = self.builder.fcmp_unordered if how == "!=" else self.builder.fcmp_ordered
        return Truth(self.builder, compare(how, self.value, self._other(other)))

    def __add__(self, other: Any) -> Number:
        return Number(self.builder, self.builder.fadd(self.value, self._other(other)))

    def __sub__(self, other: Any) -> Number:
        return Number(self.builder, self.builder.fsub(self.value, self._other(other)))

    def __rsub__(self, other: Any) -> Number:
        return Number(self.builder, self.builder.fsub(self._other(other), self.value))

    def __mul__(self, other: Any) -> Number:
        return Number(self.builder, self.builder.fmul(self.value, self._other(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return Number(self.builder, self.builder.fneg(self.value))


def _div(a: Any, b: Any) -> Number:
    a, b = _alike(a, b)
    return Number(a.builder, a.builder.fdiv(a.value, b.value))


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as traced values, a literal of the type of the other."""
    if not isinstance(a, Traced):
        a = type(b)(b.builder, b._constant(a))
    elif not isinstance(b, Traced):
        b = type(a)(a.builder, a._constant(b))
    return a, b


def _call(name: str, x: Number) -> Number:
    function = x.builder.module.declare_intrinsic(name, [FLOAT])
    return Number(x.builder, x.builder.call(function, [x.value]))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(a, Traced) and not isinstance(b, Traced):
        kind = Word if isinstance(a, int) and isinstance(b, int) else Number
        a = kind(condition.builder, kind(condition.builder, None)._constant(a))
    a, b = _alike(a, b)
    return type(a)(a.builder, a.builder.select(condition.value, a.value, a._other(b)))


def _bits_of(x: Number) -> Word:
    return Word(x.builder, x.builder.bitcast(x.value, WORD))


def _number_of(x: Word) -> Number:
    return Number(x.builder, x.builder.bitcast(x.value, FLOAT))


def _high_product(a: Word, b: Any) -> Word:
    builder, wide = a.builder, ir.IntType(64)
    product = builder.mul(builder.zext(a.value, wide), builder.zext(a._other(b), wide))
    return Word(builder, builder.trunc(builder.lshr(product, wide(32)), WORD))


def _high_sum(x: Number, word: Word) -> Word:
    """Without 64-bit lanes, which AVX2 converts no number to: the sum carries where what ``x`` leaves exceeds ``~word``.

    That is compared as numbers, in two steps of 23 and 9 bits, each exact in fp32.
    """
    whole = (x - 2.0**31) + 1.5 * 2.0**55
    rest = x - (whole - 1.5 * 2.0**55)
    # Bits placed below an exponent, whose own number is taken off again.
    high = _number_of((word >> 9) ^ 0x4FFFFFFF) - 2.0**32
    low = _number_of((word & 0x1FF) ^ 0x4B0001FF) - (2.0**23 - 1)
    carry = rest - high >= low
    return _bits_of(whole) - 0x5B400000 - Word(x.builder, x.builder.sext(carry.value, WORD))


def _half_of(x: Number) -> Word:
    half = x.builder.bitcast(x.builder.fptrunc(x.value, _HALF), ir.IntType(16))
    return Word(x.builder, x.builder.zext(half, WORD))


def _number_of_half(code: Word) -> Number:
    half = code.builder.bitcast(code.builder.trunc(code.value, ir.IntType(16)), _HALF)
    return Number(code.builder, code.builder.fpext(half, FLOAT))


_BINDINGS: dict[Callable[..., Any], Any] = {
    ops.div: _div,
    ops.sqrt: lambda x: _call("llvm.sqrt", x),
    ops.absolute: lambda x: _call("llvm.fabs", x),
    ops.where: _where,
    ops.bits_of: _bits_of,
    ops.number_of: _number_of,
    ops.high_product: _high_product,
    ops.high_sum: _high_sum,
    ops.half_of: _half_of,
    ops.number_of_half: _number_of_half,
    ops.repeat: range,
}

if set(_BINDINGS) != set(PRIMITIVES):
    raise ImportError("backends/numba/trace.py does not bind the primitives of formula/ops.py.")


@cache
def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The formula, to be called with traced values."""
    bound: Callable[..., Any] = bind(function, _BINDINGS)
    return bound
