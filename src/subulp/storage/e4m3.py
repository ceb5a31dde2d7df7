"""float8_e4m3fn: no infinity; NaN is the code above the largest number."""

# mypy: disable-error-code="no-untyped-def"

import torch

from subulp.formula.ops import bits_of, number_of, where
from subulp.storage.codec import Codec
from subulp.storage.small import to_nearest, to_neighbour

SCALE = 2.0**120
"""Brings fp32's bias, 127, to the format's, 7."""


def decode(code):
    magnitude = code & 0x7F
    sign = (code & 0x80) << 24
    # Placed below fp32's exponent the bits are the number divided by the scale, subnormals included.
    number = bits_of(number_of(magnitude << 20) * SCALE)
    return number_of(where(magnitude == 0x7F, 0x7FC00000, number) | sign)


def encode(x, draw):
    return to_neighbour(x, draw, 3, 121, 448.0, 0x7F, 0x7F, 24)


def nearest(x):
    return to_nearest(x, 3, 121, 0x7E, 0x7F, 0x7F, 24)


E4M3 = Codec("e4m3", torch.float8_e4m3fn, 8, 32, decode, encode, nearest)
