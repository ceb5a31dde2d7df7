"""Counter-based noise: a pure function of (seed, stream, step, slot, global element index).

Two levels, specified with MUST rules and test vectors in docs/noise.md:

1. *Keys.* Philox4x32-10 (Salmon et al., SC'11) turns ``(seed, stream, step, word, counter >> 32)`` into two keys.
2. *Elements.* :func:`keyed_mix` turns the low 32 bits of a counter and the two keys into one 32-bit word.

Each slot (a tensor written by the update: 0 the target, then its states) has words of its own. A *narrow* draw is 16
bits: elements ``2q`` and ``2q + 1`` take the low and the high half of word ``slot`` at counter ``q``, so that a kernel
which holds two bf16 values in a 32-bit lane mixes once for both. A *wide* draw (formats that drop more than 16 bits) is
word ``128 + slot`` at counter ``index``, whole.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
MIX_C0, MIX_C1, MIX_C2 = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
WIDE_WORD = 128
MASK32 = 0xFFFFFFFF

# Wrapper modules that put their own component into a parameter's qualified name.
_WRAPPER_COMPONENTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of four 32-bit counter words under two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = PHILOX_M0 * c0, PHILOX_M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def word_keys(seed: int, stream: int, step: int, word: int, counter_high: int = 0) -> tuple[int, int]:
    """The two keys of a word.

    One Philox block holds the keys of two words. Its key is the seed (low half first); its counter is
    ``(step, stream & 0xFFFFFFFF, stream >> 32, word // 2 + (counter_high << 8))``.
    """
    block = (word >> 1) | (counter_high << 8)
    r = philox4x32((step & MASK32, stream & MASK32, stream >> 32, block), (seed & MASK32, seed >> 32))
    return (r[2], r[3]) if word & 1 else (r[0], r[1])


def _signed(x: int) -> int:
    """The int32 with the same bits as the unsigned ``x``: torch has int32 arithmetic on every device, uint32 on few."""
    return x - (1 << 32) if x >> 31 else x


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (32 - n)) - 1)


def keyed_mix(counter: Tensor, k0: int, k1: int) -> Tensor:
    """The noise word (int32 bits) of each counter (int32)."""
    x = counter ^ _signed(k0)
    x = (x ^ _shift_right(x, 17)) * _signed(MIX_C0)
    x = x ^ _shift_right(x, 11) ^ _signed(k1)
    x = x * _signed(MIX_C1)
    x = (x ^ _shift_right(x, 15)) * _signed(MIX_C2)
    return x ^ _shift_right(x, 14) ^ counter


def noise_word(counter: Tensor, seed: int, stream: int, step: int, word: int) -> Tensor:
    """Noise word number ``word`` (int32 bits) at every counter (int64)."""
    low = _low32(counter)
    lowest, highest = (int(counter.min()) >> 32, int(counter.max()) >> 32) if counter.numel() else (0, 0)
    result = keyed_mix(low, *word_keys(seed, stream, step, word, lowest))
    for high in range(lowest + 1, highest + 1):
        mixed = keyed_mix(low, *word_keys(seed, stream, step, word, high))
        result = torch.where(counter >> 32 == high, mixed, result)
    return result


def _low32(x: Tensor) -> Tensor:
    # Folded to int32's range first: the cast of an int64 outside it is not defined on every device.
    return (((x + (1 << 31)) & MASK32) - (1 << 31)).to(torch.int32)


def narrow_draw(index: Tensor, seed: int, stream: int, step: int, slot: int) -> Tensor:
    """16 uniform bits for each global element index (int32 in [0, 65536))."""
    word = noise_word(index >> 1, seed, stream, step, slot)
    return torch.where(index & 1 == 1, word >> 16, word) & 0xFFFF


def wide_draw(index: Tensor, seed: int, stream: int, step: int, slot: int) -> Tensor:
    """32 uniform bits for each global element index (int64 in [0, 2**32))."""
    return noise_word(index, seed, stream, step, WIDE_WORD + slot).to(torch.int64) & MASK32


def stream_of_name(name: str) -> int:
    """A stable 63-bit stream id of a parameter's name, the same under DDP, FSDP, torch.compile and checkpointing.

    The prefixes which those wrappers add are removed: any ``_orig_mod``, ``_fsdp_wrapped_module`` and
    ``_checkpoint_wrapped_module`` component, and leading ``module`` components.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPER_COMPONENTS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    digest = hashlib.blake2b(".".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
