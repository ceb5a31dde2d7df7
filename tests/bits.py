"""Comparing tensors bit by bit."""

from torch import Tensor

_INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def bits(t: Tensor) -> Tensor:
    """The tensor's bits as integers: -0.0 differs from 0.0, and a NaN equals itself."""
    import torch

    t = torch.view_as_real(t) if t.is_complex() else t
    return t.detach().contiguous().view(getattr(torch, _INTEGER[t.element_size()]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal dtype, shape and bits."""
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
