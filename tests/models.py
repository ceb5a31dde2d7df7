"""Small parameters and gradients for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

import subulp

SHAPES = ((3, 5), (7,), (), (4, 1, 6), (0,), (33, 17))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_params(
    shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[Parameter]:
    g = generator(seed)
    real = torch.float32 if not dtype.is_complex else dtype
    return [Parameter(torch.randn(tuple(s), generator=g, dtype=real).to(dtype)) for s in shapes]


def set_grads(params: Sequence[Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    """Random gradients, a function of the seed and the position alone."""
    g = generator(1000 + seed)
    for p in params:
        kind = p.dtype if p.dtype.is_complex else torch.float32
        p.grad = torch.randn(p.shape, generator=g, dtype=kind).to(p.dtype)


def train(opt: torch.optim.Optimizer, params: Sequence[Tensor], steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_grads(params, step)
        opt.step()


def everything(opt: subulp.optimizer.Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters and all their state tensors."""
    return [t.detach() for p in params for t in (p, *(v for v in opt.state[p].values() if isinstance(v, Tensor)))]
