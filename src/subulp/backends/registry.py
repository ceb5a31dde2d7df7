"""Which backend serves a bucket of tensors: an explicit request that cannot be met raises, "auto" picks and can tell why."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from subulp.backends import eager


class Backend(Protocol):
    """A module or object that can run a rule over a bucket of jobs."""

    def run(self, rule: Any, jobs: Any, *, seed: int, stochastic: bool, grad_factor: float = ...) -> None:
        """Updates every job's tensors in place."""


def choose(name: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Backend:
    """The backend for a bucket."""
    return eager
