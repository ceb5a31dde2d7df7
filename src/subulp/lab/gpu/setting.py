"""Where the checks run, and the tensors that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subulp.lab.gpu.report import Fault
from subulp.lab.tensors import bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """The device and the backend under test; a ``rehearsal`` is on a CPU and small, and judges no speed."""

    device: torch.device
    backend: str = "triton"
    rehearsal: bool = False

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def free_memory(self) -> float:
        """Bytes; in a rehearsal more than anything asks for."""
        return math.inf if self.device.type == "cpu" else torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        """Gives the memory that torch keeps back to the device."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers on the CPU, a function of the arguments."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Tensor, b: Tensor, *, any_nan: bool = False) -> bool:
    """Equal dtypes, shapes and bits. ``any_nan``: a NaN equals a NaN, whose payload differs between devices."""
    a, b = (t.detach().cpu().contiguous() for t in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if any_nan:
        a, b = (torch.where(t.isnan(), torch.full_like(t, math.nan), t) for t in (a, b))
    return torch.equal(bits(a), bits(b))


def require_equal(ours: Sequence[Tensor], cpu: Sequence[Tensor], *, any_nan: bool = False) -> str:
    """Raises a fault that counts the tensors whose bits differ; says how many were compared."""
    different = sum(not same_bits(a, b, any_nan=any_nan) for a, b in zip(ours, cpu, strict=True))
    if different:
        raise Fault(f"{different} of {len(ours)} tensors differ from the CPU's")
    return f"{len(ours)} tensors equal the CPU's"
