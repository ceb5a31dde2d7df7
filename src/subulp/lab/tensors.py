"""What a step writes, and its bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def written(optimizer: Any) -> list[Tensor]:
    """The tensors that a step of a subulp optimizer writes: each parameter, then its states."""
    return [
        t.detach()
        for group in optimizer.param_groups
        for p in group["params"]
        for t in (p, *(optimizer.state[p][state.name] for state in optimizer.states(group, p)))
    ]


def bits(t: Tensor) -> Tensor:
    """The tensor's bits as integers."""
    return t.detach().view(_CARRIERS[t.element_size()])
