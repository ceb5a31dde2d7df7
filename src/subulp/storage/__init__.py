"""Storage formats: how an fp32 value becomes 32, 16 or 8 stored bits, and back. One module a format, found by itself."""

from importlib import import_module
from pkgutil import iter_modules

import torch

from subulp.storage.codec import Codec

CODECS: dict[torch.dtype, Codec] = {}
"""The formats by their dtype."""

for _module in iter_modules(__path__):
    for _value in vars(import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_value, Codec):
            CODECS[_value.dtype] = _value

ROUNDED = tuple(codec.dtype for codec in CODECS.values() if codec.draw_bits)
"""The dtypes that a store may round to."""
