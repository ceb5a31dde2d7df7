"""float8_e5m2: the upper byte of half precision."""

# mypy: disable-error-code="no-untyped-def"

import torch

from subulp.formula.ops import number_of_half
from subulp.storage.codec import Codec
from subulp.storage.small import to_nearest, to_neighbour


def decode(code):
    return number_of_half(code << 8)


def encode(x, draw):
    return to_neighbour(x, draw, 2, 113, 57344.0, 0x7C, 0x7E, 24)


def nearest(x):
    return to_nearest(x, 2, 113, 0x7C, 0x7C, 0x7E, 24)


E5M2 = Codec("e5m2", torch.float8_e5m2, 8, 32, decode, encode, nearest)
