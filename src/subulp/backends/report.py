"""What serves which tensors of an optimizer, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subulp.backends import registry


@dataclass(frozen=True)
class BucketReport:
    """The tensors of one parameter group that are updated by one launch.

    ``dtypes`` are those of the parameter, its states in the order of the rule, and the gradient (the parameter's where no
    gradient has been seen).
    """

    group: int
    device: str
    dtypes: tuple[str, ...]
    backend: str
    reason: str
    tensors: int
    elements: int

    def __str__(self) -> str:
        kinds = ", ".join(self.dtypes)
        return (
            f"group {self.group}, {self.device}, {kinds}: {self.backend} ({self.reason}); "
            f"{self.tensors} tensors, {self.elements} elements"
        )


def report_group(
    number: int, name: str, params: Sequence[Tensor], state_dtypes: Sequence[Sequence[torch.dtype]]
) -> list[BucketReport]:
    """The buckets of a group whose ``backend`` option is ``name``; ``state_dtypes[i]`` belong to ``params[i]``."""
    buckets: dict[Any, list[int]] = {}
    for p, states in zip(params, state_dtypes, strict=True):
        grad = p.dtype if p.grad is None else p.grad.dtype
        dtypes = tuple(d.to_real() for d in (p.dtype, *states, grad))
        buckets.setdefault((p.device, dtypes), []).append(p.numel())
    reports = []
    for (device, dtypes), sizes in buckets.items():
        try:
            backend, reason = registry.explain(name, device, dtypes)
        except RuntimeError as error:
            backend, reason = "none", str(error)
        kinds = tuple(str(d).removeprefix("torch.") for d in dtypes)
        reports.append(BucketReport(number, str(device), kinds, backend, reason, len(sizes), sum(sizes)))
    return reports
