"""Sums of quantities over tensors, and updates with factors by row and column: one call for any number of tensors.

``factors`` are *packed* fp32 vectors (``subulp.backends.matrices``), ``scalars`` numbers or fp64 vectors with one number for
each tensor. Sums are fp64 and have one order on every backend (``subulp.formula.sums``): the bits do not depend on threads,
on chunks or on which tensors are summed together.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subulp.backends import registry
from subulp.backends.matrices import Matrices, Operand
from subulp.formula.rule import Quantity, Rule

_MODULES = {
    "eager": "subulp.backends.eager_sums",
    "numba": "subulp.backends.numba.matrices",
    "triton": "subulp.backends.triton.matrices",
}


def sums(
    quantity: Quantity,
    matrices: Matrices,
    over: Sequence[str],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    *,
    backend: str = "auto",
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """Sums of the quantity over ``"rows"`` and ``"cols"`` (packed: one for each row or column) and over ``"all"``.

    The column ``g`` is multiplied by ``factor``.
    """
    module = _module(backend, matrices.device, matrices.dtypes(quantity.reads), factors)
    result: dict[str, Tensor] = module.sums(quantity, matrices, over, factors, scalars, factor)
    return result


def run_factored(
    rule: Rule,
    matrices: Matrices,
    steps: Sequence[int],
    factors: Mapping[str, Tensor],
    scalars: Mapping[str, Operand],
    *,
    backend: str = "auto",
    seed: int,
    stochastic: bool | tuple[bool, ...],
    factor: float = 1.0,
) -> None:
    """Updates the written tensors in place. The columns are the parameter, the rule's states and what it reads, in order.

    ``steps`` are those of the noise, one for each tensor.
    """
    module = _module(backend, matrices.device, matrices.dtypes(tuple(matrices.columns)), factors)
    arguments = (rule, matrices, steps, factors, scalars)
    module.run_factored(*arguments, seed=seed, stochastic=stochastic, factor=factor)


def _module(backend: str, device: torch.device, dtypes: Sequence[torch.dtype], factors: Mapping[str, Tensor]) -> Any:
    kinds = (*dtypes, *{t.dtype for t in factors.values()})
    return _imported(registry.choose(backend, device, kinds).NAME)


@cache
def _imported(name: str) -> Any:
    return importlib.import_module(_MODULES[name])
