"""Counter-based noise: a pure function of (seed, stream, step, slot, global element index).

Two levels, specified with MUST rules and test vectors in docs/noise.md:

1. *Keys.* Philox4x32-10 (Salmon et al., SC'11) turns ``(seed, stream, step, word, counter >> 32)`` into two keys.
2. *Elements.* :func:`keyed_mix` turns the low 32 bits of a counter and the two keys into one 32-bit word.

Each slot (a tensor written by the update: 0 the target, then its states) has words of its own. A *narrow* draw is 16
bits: elements ``2q`` and ``2q + 1`` take the low and the high half of word ``slot`` at counter ``q``, so that a kernel
which holds two bf16 values in a 32-bit lane mixes once for both. A *wide* draw (formats that drop more than 16 bits) is
word ``128 + slot`` at counter ``index``, whole.

These are formulas over words (``subulp.formula.ops``), compiled by every backend.
"""

# mypy: disable-error-code="no-untyped-def"

from subulp.formula.ops import high_product, repeat

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
MIX_C0, MIX_C1, MIX_C2 = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
WIDE_WORD = 128


def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of four counter words under two key words."""
    for _ in repeat(PHILOX_ROUNDS):
        high0 = high_product(c0, PHILOX_M0)
        high2 = high_product(c2, PHILOX_M1)
        low0 = c0 * PHILOX_M0
        low2 = c2 * PHILOX_M1
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + PHILOX_W0
        k1 = k1 + PHILOX_W1
    return c0, c1, c2, c3


def key_block(seed_low, seed_high, stream_low, stream_high, step, block, counter_high):
    """The keys of two noise words, ``2 * block`` and ``2 * block + 1``, two for each; ``block`` is below 256."""
    return philox(step, stream_low, stream_high, (counter_high << 8) | block, seed_low, seed_high)


def keyed_mix(counter, k0, k1):
    """The noise word at a counter."""
    x = counter ^ k0
    return _mixed(x ^ (x >> 17), counter, k1)


def keyed_mix_pair(counter, k0, k1):
    """The noise words at an even counter and at the next: their first steps differ in one bit."""
    x = counter ^ k0
    x = x ^ (x >> 17)
    return _mixed(x, counter, k1), _mixed(x ^ 1, counter ^ 1, k1)


def _mixed(x, counter, k1):
    x = x * MIX_C0
    x = x ^ (x >> 11) ^ k1
    x = x * MIX_C1
    x = (x ^ (x >> 15)) * MIX_C2
    return x ^ (x >> 14) ^ counter


def halves(word):
    """The two narrow draws of a noise word: that of the even element and that of the odd one."""
    return word & 0xFFFF, word >> 16


def word_of(slot: int, draw_bits: int) -> int:
    """The number of the noise word that a slot draws from."""
    return slot if draw_bits <= 16 else WIDE_WORD + slot
