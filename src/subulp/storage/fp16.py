"""fp16: IEEE half precision."""

# mypy: disable-error-code="no-untyped-def"

import torch

from subulp.formula.ops import bits_of, half_of, number_of_half, where
from subulp.storage.codec import Codec
from subulp.storage.small import to_neighbour


def decode(code):
    return number_of_half(code)


def encode(x, draw):
    return to_neighbour(x, draw, 10, 113, 65504.0, 0x7C00, 0x7E00, 16)


def nearest(x):
    return where(x == x, half_of(x), ((bits_of(x) & 0x80000000) >> 16) | 0x7E00)


FP16 = Codec("fp16", torch.float16, 16, 32, decode, encode, nearest)
