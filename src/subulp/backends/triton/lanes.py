"""Noise, formats, loads and stores of the Triton kernel: its twins of formula/noise.py and numerics/formats.py.

A *code* is the stored form of an element in a 32-bit register: bf16 in the high half (so that it is the fp32 of that
value), fp16 in the low half, fp32 as it is. A pair of elements is one word in memory: 32 bits for a 16-bit format (even
element low, odd element high), 64 bits for fp32. So four words are 16 or 32 bytes, and one noise word serves a pair.

Only builtin functions of ``triton.language`` are used: those that Triton itself writes under ``@jit`` fail in the
interpreter if Triton was imported before ``TRITON_INTERPRET`` was set. Formats are numbers, since Triton before 3.6
takes no strings in tuples.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM108  conditional expressions cannot give tuples or types in Triton

import triton
import triton.language as tl

from subulp.formula import noise

FORMATS = {"bf16": 0, "fp16": 1, "fp32": 2}

_BF16, _FP16, _FP32 = (tl.constexpr(code) for code in FORMATS.values())

_PHILOX_M0 = tl.constexpr(noise.PHILOX_M0)
_PHILOX_M1 = tl.constexpr(noise.PHILOX_M1)
_PHILOX_W0 = tl.constexpr(noise.PHILOX_W0)
_PHILOX_W1 = tl.constexpr(noise.PHILOX_W1)
_PHILOX_ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)
_MIX_C0 = tl.constexpr(noise.MIX_C0)
_MIX_C1 = tl.constexpr(noise.MIX_C1)
_MIX_C2 = tl.constexpr(noise.MIX_C2)
_WIDE_WORD = tl.constexpr(noise.WIDE_WORD)
_BF16_CARRY = tl.constexpr(255 * 2.0**120)
"""0x7F7F0000 as a number: from here on a carry would leave the finite numbers."""
_INFINITY = tl.constexpr(float("inf"))


# Noise


@triton.jit
def mix(counter, k0, k1):
    """``noise.keyed_mix`` on uint32."""
    x = counter ^ k0
    x = (x ^ (x >> 17)) * _MIX_C0
    x = x ^ (x >> 11) ^ k1
    x = x * _MIX_C1
    x = (x ^ (x >> 15)) * _MIX_C2
    return x ^ (x >> 14) ^ counter


@triton.jit
def word_keys(seed, stream, step, WORD: tl.constexpr, high):
    """``noise.word_keys`` of int64 scalars: two uint32."""
    c0 = step.to(tl.uint32)
    c1 = stream.to(tl.uint32)
    c2 = (stream >> 32).to(tl.uint32)
    c3 = ((high << 8) | (WORD // 2)).to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_PHILOX_ROUNDS):
        low0 = c0 * _PHILOX_M0
        high0 = tl.umulhi(c0, tl.full((), _PHILOX_M0, tl.uint32))
        low2 = c2 * _PHILOX_M1
        high2 = tl.umulhi(c2, tl.full((), _PHILOX_M1, tl.uint32))
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += _PHILOX_W0
        k1 += _PHILOX_W1
    if WORD % 2 == 1:
        return c2, c3
    else:
        return c0, c1


@triton.jit
def slot_keys(seed, stream, step, SLOT: tl.constexpr, FORMAT: tl.constexpr, index_high):
    """The keys of a slot's draws at global indices with ``index >> 32 == index_high``."""
    if FORMAT == _FP16:
        return word_keys(seed, stream, step, _WIDE_WORD + SLOT, index_high)
    else:
        return word_keys(seed, stream, step, SLOT, index_high >> 1)


@triton.jit
def pair_draws(index, pair, k0, k1, FORMAT: tl.constexpr):
    """The draws of the even and the odd element of each pair; ``index`` is the (even) global index of pair 0."""
    if FORMAT == _FP16:
        counter = index.to(tl.uint32) + (pair * 2).to(tl.uint32)
        return mix(counter, k0, k1), mix(counter + 1, k0, k1)
    else:
        word = mix((index >> 1).to(tl.uint32) + pair.to(tl.uint32), k0, k1)
        return word & 0xFFFF, word >> 16


@triton.jit
def single_draws(index, k0, k1, seed, stream, step, first_high, last_high, SLOT: tl.constexpr, FORMAT: tl.constexpr):
    """The draws of elements by global index (int64).

    ``k0, k1`` are the keys at ``index >> 32 == first_high``; the loop runs only in a tensor of over 2**32 elements.
    """
    if FORMAT == _FP16:
        word = mix(index.to(tl.uint32), k0, k1)
        for i in range(1, last_high - first_high + 1):
            high = first_high + i
            other0, other1 = slot_keys(seed, stream, step, SLOT, FORMAT, high)
            word = tl.where(index >> 32 == high, mix(index.to(tl.uint32), other0, other1), word)
        return word
    else:
        counter = index >> 1
        word = mix(counter.to(tl.uint32), k0, k1)
        for i in range(1, (last_high >> 1) - (first_high >> 1) + 1):
            high = (first_high >> 1) + i
            other0, other1 = slot_keys(seed, stream, step, SLOT, FORMAT, high * 2)
            word = tl.where(counter >> 32 == high, mix(counter.to(tl.uint32), other0, other1), word)
        return tl.where((index & 1) == 1, word >> 16, word & 0xFFFF)


# Formats


@triton.jit
def value_of(code, FORMAT: tl.constexpr):
    """The fp32 value of a code."""
    if FORMAT == _FP16:
        return code.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x, FORMAT: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True)
    if FORMAT == _FP32:
        return bits
    elif FORMAT == _BF16:
        return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x00400000)
    else:
        code = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return tl.where(x == x, code, ((bits & 0x80000000) >> 16) | 0x7E00)


@triton.jit
def _stochastic(x, draw, FORMAT: tl.constexpr, RAW: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True)
    if FORMAT == _BF16:
        code = tl.where(tl.abs(x) < _BF16_CARRY, bits + draw, bits)
        if RAW:
            code = tl.where(x == x, code, code | 0x00400000)
        return code
    else:
        magnitude = bits & 0x7FFFFFFF
        exponent = magnitude >> 23
        mantissa = tl.where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
        exponent = tl.where(exponent > 0, exponent, 1)
        shift = tl.where(exponent < 113, 126 - exponent, 13)
        shift = tl.where(shift < 63, shift, 63)
        kept_and_fraction = (mantissa.to(tl.uint64) << 32) >> shift.to(tl.uint64)
        code = ((kept_and_fraction + draw.to(tl.uint64)) >> 32).to(tl.uint32)
        code += tl.where(exponent > 113, exponent - 113, 0) << 10
        code = tl.where(code < 0x7BFF, code, 0x7BFF)
        code = tl.where(magnitude == 0x7F800000, 0x7C00, code)
        code = tl.where(magnitude > 0x7F800000, 0x7E00, code)
        return code | ((bits & 0x80000000) >> 16)


@triton.jit
def code_of(
    x, old_code, draw, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, RAW: tl.constexpr, KEEPS_NONFINITE: tl.constexpr
):
    """The code of fp32 values: rounded, or ``old_code`` where that is an Inf or NaN which has to stay."""
    if STOCHASTIC and FORMAT != _FP32:
        code = _stochastic(x, draw, FORMAT, RAW)
    else:
        code = _nearest(x, FORMAT)
    if KEEPS_NONFINITE:
        code = tl.where(tl.abs(value_of(old_code, FORMAT)) < _INFINITY, code, old_code)
    return code


# Memory. Addresses are int64 and come from a table. Those of pairs are multiples of 16: tables.fast_tensors.


@triton.jit
def element_address(address, position, FORMAT: tl.constexpr):
    """The address of the element at a storage position (int64)."""
    if FORMAT == _FP32:
        return address + position * 4
    else:
        return address + position * 2


@triton.jit
def _pair_pointer(address, FORMAT: tl.constexpr):
    address = tl.multiple_of(address, 16)
    if FORMAT == _FP32:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def load_pairs(address, pair, inside, FORMAT: tl.constexpr):
    """The codes of the even and the odd element of each pair."""
    word = tl.load(_pair_pointer(address, FORMAT) + pair, mask=inside)
    if FORMAT == _FP32:
        return word.to(tl.uint32), (word >> 32).to(tl.uint32)
    elif FORMAT == _BF16:
        return word << 16, word & 0xFFFF0000
    else:
        return word & 0xFFFF, word >> 16


@triton.jit
def store_pairs(address, pair, inside, even, odd, FORMAT: tl.constexpr):
    """Stores the codes of the even and the odd element of each pair."""
    if FORMAT == _FP32:
        word = even.to(tl.uint64) | (odd.to(tl.uint64) << 32)
    elif FORMAT == _BF16:
        word = (even >> 16) | (odd & 0xFFFF0000)
    else:
        word = even | (odd << 16)
    tl.store(_pair_pointer(address, FORMAT) + pair, word, mask=inside)


@triton.jit
def load_singles(address, j, inside, FORMAT: tl.constexpr):
    """The codes of single elements."""
    if FORMAT == _FP32:
        return tl.load(address.to(tl.pointer_type(tl.uint32)) + j, mask=inside)
    else:
        code = tl.load(address.to(tl.pointer_type(tl.uint16)) + j, mask=inside).to(tl.uint32)
        if FORMAT == _BF16:
            code = code << 16
        return code


@triton.jit
def store_singles(address, j, inside, code, FORMAT: tl.constexpr):
    """Stores the codes of single elements."""
    if FORMAT == _FP32:
        tl.store(address.to(tl.pointer_type(tl.uint32)) + j, code, mask=inside)
    else:
        if FORMAT == _BF16:
            code = code >> 16
        tl.store(address.to(tl.pointer_type(tl.uint16)) + j, code.to(tl.uint16), mask=inside)
