"""Where the elements of a tensor lie: storage order against global (row-major) element index.

Noise is keyed by the global element index, so that it does not depend on memory format or sharding. Kernels walk memory
in storage order. A :class:`Layout` maps one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Global index of the element at storage position k: ``base + sum(digit_d(k) * stride_d)``.

    ``sizes`` (outermost first) are the digits' radices and ``strides`` the global index strides; dimensions that follow
    on from one another are merged, so a contiguous unsharded tensor has one dimension of stride 1.
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Global indices (int64) of the storage positions ``start <= k < stop``."""
        if len(self.sizes) == 1:
            return torch.arange(start, stop, device=device).mul_(self.strides[0]).add_(self.base)
        rest = torch.arange(start, stop, device=device)
        result = torch.full_like(rest, self.base)
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            result += (rest % size) * stride
            rest = rest // size
        return result


@lru_cache(maxsize=65536)
def layout_of(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    global_shape: tuple[int, ...],
    global_offset: tuple[int, ...],
    base: int = 0,
) -> Layout:
    """The layout of a dense local tensor that is the block at ``global_offset`` of a tensor of ``global_shape``."""
    global_strides = row_major_strides(global_shape)
    base += sum(o * s for o, s in zip(global_offset, global_strides, strict=True))
    sizes: list[int] = []
    strides: list[int] = []
    for d in sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -stride[d]):
        if sizes and strides[-1] == global_strides[d] * shape[d]:
            sizes[-1] *= shape[d]
            strides[-1] = global_strides[d]
        else:
            sizes.append(shape[d])
            strides.append(global_strides[d])
    return Layout(base, tuple(sizes) or (1,), tuple(strides) or (1,))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlap, in some order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for d in sorted((d for d in range(t.dim()) if t.size(d) != 1), key=lambda d: t.stride(d)):
        if t.stride(d) != expected:
            return False
        expected *= t.size(d)
    return True
