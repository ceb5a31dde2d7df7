"""torch's own tables of optimizer inputs. They are in ``torch.testing._internal``: nothing else may import from there."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import subulp

Kwargs = dict[str, Any]


@cache
def _database() -> dict[str, Any]:
    # Imported at the first use: it takes five seconds. It would also forbid the whole process to set torch.backends' flags.
    try:
        with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
            warnings.simplefilter("ignore")
            module: Any = importlib.import_module("torch.testing._internal.common_optimizers")
    except ImportError as error:
        pytest.skip(
            f"torch {torch.__version__} gives no optimizer tables ({error}); pip install expecttest if that is it."
        )
    return {info.optim_cls.__name__: info for info in module.optim_db}


def _read(entry: Any, *names: str) -> list[Any]:
    missing = [name for name in names if not hasattr(entry, name)]
    if missing:
        pytest.fail(
            f"torch {torch.__version__} has no {missing} in its optimizer tables any more: tests/torch_tables.py must follow."
        )
    return [getattr(entry, name) for name in names]


@dataclass(frozen=True)
class Swap:
    """One of our classes in the place of torch's."""

    ours: Callable[..., subulp.optimizer.Optimizer]
    theirs: type[torch.optim.Optimizer]
    renamed: dict[str, str] = field(default_factory=dict)
    """Our name of a keyword of torch's."""
    matrices: bool = False
    """Takes parameters with two dimensions only."""

    @property
    def name(self) -> str:
        return self.theirs.__name__

    def __repr__(self) -> str:
        return self.name

    def make(self, params: Any, **kwargs: Any) -> subulp.optimizer.Optimizer:
        # One stream for all, since tests compare two in one process.
        return self.ours(params, stream=0, **{self.renamed.get(key, key): value for key, value in kwargs.items()})

    def pair(self, ours: Any, theirs: Any, kwargs: Kwargs) -> tuple[subulp.optimizer.Optimizer, torch.optim.Optimizer]:
        """Both on equal inputs; neither writes into the other's tensors."""
        return self.make(ours, **copy.deepcopy(kwargs)), self.theirs(theirs, **copy.deepcopy(kwargs))

    @property
    def info(self) -> Any:
        found = _database().get(self.name)
        if found is None:
            pytest.skip(f"torch {torch.__version__} has no {self.name} in its optimizer tables.")
        return found

    def inputs(self, device: str = "cpu") -> Iterator[tuple[str, Kwargs]]:
        """(description, keywords) of every input of torch's table, fresh: schedulers write into tensors."""
        (function,) = _read(self.info, "optim_inputs_func")
        for entry in function(device=device):
            description, kwargs = _read(entry, "desc", "kwargs")
            yield description, dict(kwargs)

    def flagged(self) -> Iterator[tuple[str, Kwargs]]:
        """:meth:`inputs`, each also with foreach and with fused where torch's class has them on a CPU."""
        flags, fused_on = _read(self.info, "supported_impls", "supports_fused_on")
        for description, kwargs in self.inputs():
            yield description, kwargs
            for flag in ("foreach", "fused"):
                if flag in flags and (flag != "fused" or "cpu" in fused_on):
                    yield f"{description} & {flag}", {**kwargs, flag: True}

    def errors(self) -> list[tuple[str, Any, Kwargs, type[BaseException], bool]]:
        """(description, parameters or None, keywords, type of the error, whether it comes at construction)."""
        (function,) = _read(self.info, "optim_error_inputs_func")
        found = []
        for entry in function(device="cpu", dtype=torch.float32):
            given, error, when = _read(entry, "optimizer_error_input", "error_type", "error_on")
            description, params, kwargs = _read(given, "desc", "params", "kwargs")
            found.append((description, params, dict(kwargs), error, when.name == "CONSTRUCTION_ERROR"))
        return found

    def schedulers(self) -> list[list[Callable[[Any], Any]]]:
        """Lists of schedulers that act on one optimizer together."""
        return [list(together) for together in _read(self.info, "scheduler_inputs")[0]]

    def later_flags(self) -> set[str]:
        """Keywords that torch's class got after its first release; older checkpoints lack them."""
        return set(_read(self.info, "not_og_supported_flags")[0])


SWAPS = [
    Swap(subulp.AdamW, torch.optim.AdamW),
    Swap(subulp.Adam, torch.optim.Adam),
    Swap(subulp.SGD, torch.optim.SGD),
    Swap(
        partial(subulp.Adafactor, semantics="torch"),
        torch.optim.Adafactor,
        {"beta2_decay": "decay_rate", "d": "clip_threshold"},
    ),
    *([Swap(subulp.Muon, torch.optim.Muon, matrices=True)] if hasattr(torch.optim, "Muon") else []),
]

ELEMENTWISE = SWAPS[:3]

all_swaps = pytest.mark.parametrize("swap", SWAPS, ids=repr)
elementwise_swaps = pytest.mark.parametrize("swap", ELEMENTWISE, ids=repr)

DIFFERENCES: dict[tuple[str, str], str] = {
    ("keyword", "beta2_decay"): "transformers' decay_rate: one class serves both semantics (Swap.renamed).",
    ("keyword", "d"): "transformers' clip_threshold, as above.",
    (
        "group key",
        "AdamW decoupled_weight_decay",
    ): "torch's AdamW is its Adam with this flag set; it is no keyword.",
    (
        "error",
        "lr as Tensor doesn't work with foreach & not capturable",
    ): "foreach is ignored; tensors are always taken.",
    ("error", "betas must be either both floats or both Tensors"): "Each is read by itself: a mixture is no problem.",
    (
        "error",
        r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
    ): "foreach is ignored; tensors are always taken.",
    ("sparse", "SGD"): "torch's SGD takes sparse gradients; ours refuses them as every other class does.",
    ("zero size", "Adafactor"): "torch's divides by the number of elements; ours leaves empty parameters alone.",
    ("zero size", "Muon"): "torch's divides by the number of rows; ours leaves empty parameters alone.",
    (
        "step dtype",
        "*",
    ): "Ours is float64 under every default dtype and counts exactly; float32 stops at 2**24.",
    (
        "state names",
        "Adafactor",
    ): "transformers' exp_avg_sq_row, _col, exp_avg_sq, not torch's row_var, col_var, variance.",
    (
        "differentiable",
        "SGD's first momentum",
    ): "torch detaches the first buffer from the graph; ours keeps its gradient.",
    ("capturable", "cpu"): "torch's capturable=True refuses CPU parameters; ours accepts it, with the bits of False.",
}
"""Every case where ours differ from torch's on purpose, and why. A test that skips a case looks it up here."""


def differs(kind: str, case: str) -> bool:
    """Whether the case is in the table of deliberate differences."""
    return (kind, case) in DIFFERENCES


class Model:
    """A small regression: a matrix and, unless ``matrices``, a vector; closures give gradients, equal for equal values."""

    def __init__(self, matrices: bool, dtype: torch.dtype = torch.float32, contiguous: bool = True) -> None:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        weight, bias, self.x = draw(10, 5, 2).to(dtype), draw(10, 2).to(dtype), draw(5).to(dtype)
        self.weight = torch.nn.Parameter(weight[..., 0].contiguous() if contiguous else weight[..., 0])
        self.bias = torch.nn.Parameter(bias[..., 0].contiguous() if contiguous else bias[..., 0])
        self.params = [self.weight] if matrices else [self.weight, self.bias]
        self.named = list(zip(("weight", "bias"), self.params, strict=False))

    def loss(self) -> Tensor:
        return (self.weight.mv(self.x) + self.bias).float().square().sum()

    def closure(self) -> Tensor:
        self.weight.grad = self.bias.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, opt: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.closure()
            opt.step()
