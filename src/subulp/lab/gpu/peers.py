"""The optimizers that are timed side by side. What is not installed is named and left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

import subulp
from subulp.lab.bench.peers import HYPERPARAMETERS, IMPLEMENTATIONS
from subulp.lab.bench.workloads import Workload

OURS = "subulp"
YARDSTICK = "torch fused"


@dataclass(frozen=True)
class Peer:
    """``make(params, backend)`` gives the optimizer; subulp alone has a backend to choose."""

    make: Callable[[list[Tensor], str], Any]
    module: str = "torch"
    distribution: str = "torch"
    most_tensors: int | None = None
    """More are left out: it would compile for hours."""

    def missing(self) -> str | None:
        """What to install, if it is not."""
        return (
            None if find_spec(self.module) is not None else f"not installed: pip install --no-deps {self.distribution}"
        )

    def serves(self, workload: Workload) -> bool:
        """Whether it is timed on this workload."""
        return self.most_tensors is None or len(workload.shapes) <= self.most_tensors


def _subulp(**options: Any) -> Peer:
    return Peer(lambda params, backend: subulp.AdamW(params, **HYPERPARAMETERS, backend=backend, **options))


def _of_the_benchmark(name: str) -> Peer:
    known = IMPLEMENTATIONS[name]
    return Peer(lambda params, backend: known.make(params), known.module, known.distribution, known.most_tensors)


def _flashoptim(params: list[Tensor], backend: str) -> Any:
    return import_module("flashoptim").FlashAdamW(params, lr=1e-3)


PEERS = {
    OURS: _subulp(),
    YARDSTICK: _of_the_benchmark("torch-fused"),
    "subulp, nearest": _subulp(stochastic_rounding=False),
    "torch foreach": _of_the_benchmark("torch-foreach"),
    "flashoptim": Peer(_flashoptim, "flashoptim", "flashoptim"),
    "torchao": _of_the_benchmark("torchao"),
    "heavyball": _of_the_benchmark("heavyball"),
}
"""In the order of timing: what the goals need comes first, what compiles longest comes last."""
