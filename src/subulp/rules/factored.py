"""Second moments kept as row and column means (Adafactor, CAME), and what they imply for an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subulp.backends.sums import square_sums, weighted_square_sum
from subulp.formula.ops import div, sqrt
from subulp.formula.rule import State
from subulp.sharding import sum_over_shards
from subulp.staged import Stages, factor_rows
from subulp.torch_internals import local_tensor

Blocks = Callable[[int, int], Tensor]
"""A tensor of the parameter's shape by blocks of rows."""

Sums = Callable[[int, int], tuple[Tensor, Tensor]]
"""Sums of the squares of such a tensor over its last and its last but one dimension, by blocks of rows."""


class OuterProduct:
    """``by_row * by_col``, shapes (..., rows, 1) and (..., 1, columns), by blocks of rows."""

    def __init__(self, by_row: Tensor, by_col: Tensor) -> None:
        self.by_row = by_row
        self.by_col = by_col

    def __call__(self, start: int, stop: int) -> Tensor:
        by_row, by_col = self.factors(start, stop)
        return by_row * by_col

    def factors(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return factor_rows(self.by_row, start, stop), factor_rows(self.by_col, start, stop)


def factored_states(name: str) -> tuple[State, ...]:
    """Row and column means, for parameters of two dimensions or more."""
    row, col = (f"{axis}_var" if name == "exp_avg_sq" else None for axis in ("row", "col"))  # in torch.optim.Adafactor
    return (
        State(f"{name}_row", True, True, averaged=-1, alias=row),
        State(f"{name}_col", True, True, averaged=-2, alias=col),
    )


def whole_state(name: str) -> tuple[State, ...]:
    """The second moment of a parameter that is not factored; in fp32, as the factors, since such parameters are small."""
    return (State(name, True, True, alias="variance"),)


def inverse_root(
    stages: Stages,
    name: str,
    beta2: float,
    floor: float,
    clamp: float | None = None,
    scale: Tensor | float = 1.0,
    correction: float = 1.0,
    sums: Sums | None = None,
    reads: Sequence[Tensor] = (),
) -> Blocks:
    """Updates the second moment ``name`` with the squares of values; returns blocks of ``1 / sqrt(v)``, as new tensors.

    ``v = beta2 * v + (1 - beta2) * (scale * values**2 + floor)``. The values are the gradient, or else ``sums`` gives the
    sums of their squares, and ``reads`` are the local tensors that it reads beside the gradient. With two dimensions or
    more only the means R over the last and C over the last but one dimension are kept, and ``v_ij`` is taken as
    ``R_i * C_j / mean(R)`` (Shazeer and Stern 2018, section 3). ``correction`` divides R and C (and so v) where they are
    used. ``clamp``: mean(R) is at least this and v at least its square, as in ``torch.optim.Adafactor``.
    """
    if len(stages.shape) < 2:
        return _whole(stages, name, beta2, floor, clamp)
    row, col = _mean_squares(
        stages, sums or (lambda start, stop: square_sums(stages.stored_gradient(start, stop), stages.native)), reads
    )
    kept_row, kept_col = (local_tensor(stages.state[f"{name}_{key}"]) for key in ("row", "col"))
    for kept, mean in ((kept_row, row), (kept_col, col)):
        kept.copy_(beta2 * kept.double() + (1 - beta2) * (scale * mean + floor))
    last_but_one = len(stages.shape) - 2
    exact = kept_row.double()
    mean_row = sum_over_shards(exact.sum(-1, keepdim=True), stages.p, {last_but_one}) / stages.shape[-2]
    if clamp is not None:
        by_row = (exact / mean_row.clamp(min=clamp)).to(stages.dtype).unsqueeze(-1)
        by_col = kept_col.to(stages.dtype).unsqueeze(-2)
        outer = OuterProduct(by_row, by_col)
        return lambda start, stop: _clamped_root(outer(start, stop), clamp)
    by_row = (exact / mean_row).rsqrt().to(stages.dtype).unsqueeze(-1)
    by_col = (kept_col.double() / correction).rsqrt().to(stages.dtype).unsqueeze(-2)
    return OuterProduct(by_row, by_col)


def _clamped_root(v: Tensor, clamp: float) -> Tensor:
    return div(torch.ones((), dtype=v.dtype, device=v.device), sqrt(v.clamp_(min=clamp * clamp)))


def _whole(stages: Stages, name: str, beta2: float, floor: float, clamp: float | None) -> Blocks:
    v = local_tensor(stages.state[name])
    for start, stop in stages.blocks():
        part = stages.rows(v, start, stop)
        part.copy_(beta2 * part + (1 - beta2) * (stages.gradient(start, stop).square() + floor))
    # A clamp of 0 changes nothing.
    return lambda start, stop: _clamped_root(stages.rows(v, start, stop).clone(), clamp or 0.0)


def _mean_squares(stages: Stages, sums: Sums, reads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Means (fp64) of squares over the last and the last but one dimension of the whole parameter."""
    shape, dims = stages.local.shape, len(stages.shape)
    row = torch.zeros(shape[:-1], dtype=torch.float64, device=stages.local.device)
    col = torch.zeros((*shape[:-2], shape[-1]), dtype=torch.float64, device=stages.local.device)
    for start, stop in stages.ranges(stages.grad, *reads):
        by_row, by_col = sums(start, stop)
        row[start:stop] = by_row
        if dims == 2:
            col += by_col
        else:
            col[start:stop] = by_col
    sum_over_shards(row, stages.p, {dims - 1})
    sum_over_shards(col, stages.p, {dims - 2})
    return row / stages.shape[-1], col / stages.shape[-2]


def update_of(stages: Stages, inverse: Blocks) -> Blocks:
    """``u = g / sqrt(v)``, from blocks of ``1 / sqrt(v)``."""
    return lambda start, stop: inverse(start, stop).mul_(stages.gradient(start, stop))


def size_of_update(stages: Stages, inverse: Blocks) -> Tensor:
    """The root mean square of u over the whole parameter: fp64, 0-d, on its device."""
    if not isinstance(inverse, OuterProduct):
        return stages.root_mean_square(update_of(stages, inverse))
    total = torch.zeros((), dtype=torch.float64, device=stages.local.device)
    for start, stop in stages.ranges(stages.grad):
        total += weighted_square_sum(
            stages.stored_gradient(start, stop), *inverse.factors(start, stop), native=stages.native
        )
    return stages.root_of_mean(total)
