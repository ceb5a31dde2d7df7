"""Noise for tensors: the draws of many elements, by their global index. The reference of what kernels draw."""

from __future__ import annotations

import torch
from torch import Tensor

from subulp.formula.noise import halves, key_block, keyed_mix, word_of
from subulp.formula.words import MASK, Word, chosen


def word_keys(seed: int, stream: int, step: int, word: int, counter_high: int = 0) -> tuple[int, int]:
    """The two keys of a noise word."""
    inputs = (seed & MASK, seed >> 32, stream & MASK, stream >> 32, step & MASK)
    s0, s1, t0, t1, at = map(Word, inputs)
    block = key_block(s0, s1, t0, t1, at, word >> 1, Word(counter_high & MASK))
    k0, k1 = (key.integers() for key in (block[2:] if word & 1 else block[:2]))
    return k0, k1


def noise_word(counter: Tensor, seed: int, stream: int, step: int, word: int) -> Word:
    """Noise word number ``word`` at every counter (int64)."""
    low = Word(_low32(counter))
    lowest, highest = (int(counter.min()) >> 32, int(counter.max()) >> 32) if counter.numel() else (0, 0)
    result: Word = keyed_mix(low, *map(Word, word_keys(seed, stream, step, word, lowest)))
    for high in range(lowest + 1, highest + 1):
        mixed = keyed_mix(low, *map(Word, word_keys(seed, stream, step, word, high)))
        result = chosen(counter >> 32 == high, mixed, result)
    return result


def _low32(x: Tensor) -> Tensor:
    # Folded to int32's range first: the cast of an int64 outside it is not defined on every device.
    return (((x + (1 << 31)) & MASK) - (1 << 31)).to(torch.int32)


def draw(index: Tensor, seed: int, stream: int, step: int, slot: int, draw_bits: int) -> Word:
    """So many uniform bits (16 or 32) for each global element index."""
    word = word_of(slot, draw_bits)
    if draw_bits > 16:
        return noise_word(index, seed, stream, step, word)
    even, odd = halves(noise_word(index >> 1, seed, stream, step, word))
    return chosen(index & 1 == 1, odd, even)
