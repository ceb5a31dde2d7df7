"""bf16: the upper half of fp32.

The draw is added below the kept half and the sum is cut, ``(bits + r16) >> 16``, so that ``P(up) = dropped / 2**16`` exactly,
in every binade and in the subnormals (docs/noise.md).
"""

# mypy: disable-error-code="no-untyped-def"

import torch

from subulp.formula.ops import absolute, bits_of, number_of, where
from subulp.storage.codec import Codec

CARRY = 255 * 2.0**120
"""0x7F7F0000 as a number: from here on a carry would leave the finite numbers."""
QUIET = 0x00400000


def decode(code):
    return number_of(code << 16)


def encode(x, draw):
    return (bits_of(x) + where(absolute(x) < CARRY, draw, 0)) >> 16


def nearest(x):
    bits = bits_of(x)
    # torch's own conversion drops the sign of a NaN on some paths.
    return where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | QUIET) >> 16


def quiet(x):
    bits = bits_of(x)
    return number_of(where(x == x, bits, bits | QUIET))


BF16 = Codec("bf16", torch.bfloat16, 16, 16, decode, encode, nearest, quiet, keeps_specials=True)
