"""An implementation with its own parameters and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from subulp.lab.bench.peers import Implementation
from subulp.lab.bench.workloads import Data


class Candidate:
    """An optimizer over copies of the weights. ``gradients``, if given, are shared with other candidates."""

    def __init__(self, implementation: Implementation, data: Data, gradients: list[Tensor] | None = None) -> None:
        self.implementation = implementation
        self.params = [Parameter(w.clone()) for w in data.weights]
        self.gradients = [g.clone() for g in data.gradients] if gradients is None else gradients
        groups: list[Any] = [{"params": [p]} for p in self.params] if data.one_group_each else list(self.params)
        self.optimizer = implementation.make(groups)


def renew_gradients(params: Sequence[Tensor], values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Writes the gradients afresh, as a backward pass does: some optimizers overwrite them or drop them."""
    torch._foreach_copy_(list(gradients), list(values))
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
