"""The named functions that formulas may use besides ``+ - *`` and comparisons: their meaning on torch tensors.

A formula (``subulp.rules``) is written once over these names. Here they act on tensors; the Numba and Triton backends
compile the same function object with bindings of their own, which must give the same bits. So each is exactly rounded:
no fused multiply-add, no approximate division or square root.
"""

import torch
from torch import Tensor


def div(a: Tensor, b: Tensor) -> Tensor:
    """Correctly rounded ``a / b``."""
    return a / b


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root.

    torch's vectorised fp32 square root on CPU is an ulp off for about 20 % of its inputs; the fp64 root rounded to fp32
    is exact, because 53 >= 2 * 24 + 2 bits make the double rounding harmless.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return x.double().sqrt().float()
    return x.sqrt()


def absolute(x: Tensor) -> Tensor:
    """``|x|``, by clearing the sign bit."""
    return x.abs()


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """``a`` where the condition holds, else ``b``."""
    return torch.where(condition, a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of the two; NaN if either is NaN."""
    return torch.maximum(a, b)


def sign(x: Tensor) -> Tensor:
    """-1, +1, or ``x`` itself where it is a zero or a NaN."""
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x))
