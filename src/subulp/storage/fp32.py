"""fp32: every number is exact."""

# mypy: disable-error-code="no-untyped-def"

import torch

from subulp.formula.ops import bits_of, number_of
from subulp.storage.codec import Codec


def decode(code):
    return number_of(code)


def nearest(x):
    return bits_of(x)


def encode(x, draw):
    return bits_of(x)


FP32 = Codec("fp32", torch.float32, 32, 0, decode, encode, nearest)
