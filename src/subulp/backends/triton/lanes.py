"""Noise and memory of the Triton kernel.

A *code* is the stored form of an element, in the low bits of a 32-bit register. A pair of elements is one word in memory, of
twice their size, the even element in its low half: so four words are up to 32 bytes, and one noise word serves a pair. The
size of an element is 1, 2 or 4 bytes, a draw has 0, 16 or 32 bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from subulp.backends.triton.bindings import jitted
from subulp.formula import noise

_mix = jitted(noise.keyed_mix)
_mix_pair = jitted(noise.keyed_mix_pair)
_halves = jitted(noise.halves)
_key_block = jitted(noise.key_block)


@triton.jit
def word_keys(seed, stream, step, WORD: tl.constexpr, counter_high):
    """The two keys of a noise word; int64 scalars."""
    r0, r1, r2, r3 = _key_block(
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        stream.to(tl.uint32),
        (stream >> 32).to(tl.uint32),
        step.to(tl.uint32),
        WORD // 2,
        counter_high.to(tl.uint32),
    )
    if WORD % 2 == 1:
        return r2, r3
    else:
        return r0, r1


@triton.jit
def slot_keys(seed, stream, step, WORD: tl.constexpr, DRAW: tl.constexpr, index_high):
    """The keys of a slot's draws at global indices with ``index >> 32 == index_high``."""
    if DRAW == 32:
        return word_keys(seed, stream, step, WORD, index_high)
    else:
        return word_keys(seed, stream, step, WORD, index_high >> 1)


@triton.jit
def pair_draws(index, pair, k0, k1, DRAW: tl.constexpr):
    """The draws of the even and the odd element of each pair; ``index`` is the (even) global index of pair 0."""
    if DRAW == 32:
        return _mix_pair(index.to(tl.uint32) + (pair * 2).to(tl.uint32), k0, k1)
    else:
        return _halves(_mix((index >> 1).to(tl.uint32) + pair.to(tl.uint32), k0, k1))


@triton.jit
def single_draws(index, k0, k1, seed, stream, step, first_high, last_high, WORD: tl.constexpr, DRAW: tl.constexpr):
    """The draws of elements by global index (int64).

    ``k0, k1`` are the keys at ``index >> 32 == first_high``; the loop runs only in a tensor of over 2**32 elements.
    """
    if DRAW == 32:
        counter = index
        first = first_high
        last = last_high
    else:
        counter = index >> 1
        first = first_high >> 1
        last = last_high >> 1
    word = _mix(counter.to(tl.uint32), k0, k1)
    for i in range(1, last - first + 1):
        other0, other1 = word_keys(seed, stream, step, WORD, first + i)
        word = tl.where(counter >> 32 == first + i, _mix(counter.to(tl.uint32), other0, other1), word)
    if DRAW == 32:
        return word
    else:
        even, odd = _halves(word)
        return tl.where((index & 1) == 1, odd, even)


# Memory. Addresses are int64 and come from a table. Those of pairs are multiples of 16: tables.fast_tensors.


@triton.jit
def _pair_pointer(address, SIZE: tl.constexpr):
    address = tl.multiple_of(address, 16)
    if SIZE == 4:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    elif SIZE == 2:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), 16)


@triton.jit
def load_pairs(address, pair, inside, SIZE: tl.constexpr):
    """The codes of the even and the odd element of each pair."""
    word = tl.load(_pair_pointer(address, SIZE) + pair, mask=inside)
    if SIZE == 4:
        return word.to(tl.uint32), (word >> 32).to(tl.uint32)
    elif SIZE == 2:
        return word & 0xFFFF, word >> 16
    else:
        return (word & 0xFF).to(tl.uint32), (word >> 8).to(tl.uint32)


@triton.jit
def store_pairs(address, pair, inside, even, odd, SIZE: tl.constexpr):
    """Stores the codes of the even and the odd element of each pair."""
    if SIZE == 4:
        word = even.to(tl.uint64) | (odd.to(tl.uint64) << 32)
    elif SIZE == 2:
        word = even | (odd << 16)
    else:
        word = (even | (odd << 8)).to(tl.uint16)
    tl.store(_pair_pointer(address, SIZE) + pair, word, mask=inside)


@triton.jit
def _pointer(address, SIZE: tl.constexpr):
    if SIZE == 4:
        return address.to(tl.pointer_type(tl.uint32))
    elif SIZE == 2:
        return address.to(tl.pointer_type(tl.uint16))
    else:
        return address.to(tl.pointer_type(tl.uint8))


@triton.jit
def load_singles(address, j, inside, SIZE: tl.constexpr):
    """The codes of single elements."""
    return tl.load(_pointer(address, SIZE) + j, mask=inside).to(tl.uint32)


@triton.jit
def store_singles(address, j, inside, code, SIZE: tl.constexpr):
    """Stores the codes of single elements."""
    pointer = _pointer(address, SIZE) + j
    if SIZE == 4:
        tl.store(pointer, code, mask=inside)
    elif SIZE == 2:
        tl.store(pointer, code.to(tl.uint16), mask=inside)
    else:
        tl.store(pointer, code.to(tl.uint8), mask=inside)
