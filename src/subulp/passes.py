"""Passes over the parameters of a group: sums over each of them, numbers that follow from sums, and one update of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends import registry, sums
from subulp.backends.bucket import Bucket
from subulp.backends.matrices import Matrices, Operand, Stacks, scalar_table
from subulp.formula.compose import part, quantity
from subulp.formula.rule import Quantity, Rule
from subulp.numerics.layout import Layout, layout_of, row_major_strides
from subulp.options import rounding_of
from subulp.sharding import sum_over_shards
from subulp.torch_internals import global_block, is_dtensor, local_tensor


@part("x")
def itself(g):  # type: ignore[no-untyped-def]
    return g


ITSELF = quantity(itself)
NONE: Mapping[str, Any] = MappingProxyType({})


class Kind:
    """What of parameters with equal dtypes, device and sharding stays the same from step to step, and follows from shapes."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
        first = params[0]
        self.device = local_tensor(first).device
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        blocks = [global_block(p) for p in params]
        self.shapes = [shape for shape, _ in blocks]
        """Of the whole parameters."""
        own = [tuple(local_tensor(p).shape) for p in params]
        self.sharded = any(map(is_dtensor, params))
        layouts = [
            layout_of(shape, row_major_strides(shape), whole, offset)
            for shape, (whole, offset) in zip(own, blocks, strict=True)
        ]
        self.stacks = Stacks(own, layouts, [int(state["stream"]) for state in states])
        self._parts: dict[tuple[int, ...], Kind] = {}
        self.numel = self.vector([prod(shape) for shape in self.shapes])
        """Elements of each whole parameter."""

    def only(self, chosen: tuple[int, ...], params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> Kind:
        """The kind of some of its parameters, which are ``params``."""
        if chosen not in self._parts:
            self._parts[chosen] = Kind(params, states)
        return self._parts[chosen]

    def vector(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)

    @cache  # noqa: B019  a kind is kept as long as its optimizer's plan
    def counts(self, over: str) -> Tensor:
        """The rows or columns of this process's part of each parameter, over its stack."""
        counts = self.stacks.rows if over == "rows" else self.stacks.cols
        return torch.from_numpy(counts).to(self.device)

    @cache  # noqa: B019
    def counts_of_matrices(self, over: str) -> Tensor:
        """The rows or columns of each matrix."""
        shapes = self.stacks.shapes
        return torch.from_numpy(np.repeat(shapes[:, 1 if over == "rows" else 2], shapes[:, 0])).to(self.device)

    @cache  # noqa: B019
    def extent(self, dim: int, over: str) -> Tensor:
        """The size of dimension -1 or -2 of each whole parameter, for each of its "rows", "cols" or "matrices"."""
        sizes = self.vector([shape[dim] for shape in self.shapes])
        if over == "matrices":
            return sizes.repeat_interleave(torch.from_numpy(self.stacks.shapes[:, 0].copy()).to(self.device))
        return sizes.repeat_interleave(self.counts(over))


class Passes:
    """Parameters of one group that have equal dtypes, device and sharding, in one step.

    *Packed* vectors have a number for each row ("rows") or column ("cols") of this process's part of every parameter, one
    parameter after the other; "all" vectors have one for each parameter. All of them are fp64 and stay on the device.
    """

    def __init__(
        self,
        kind: Kind,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        steps: npt.NDArray[np.int64],
        factor: float,
    ) -> None:
        self.kind = kind
        self.group = group
        self.params = params
        self.grads = grads
        self.states = states
        self.steps = steps
        self.factor = factor
        self.backend: str = group["backend"]
        self._copies: list[tuple[Tensor, Tensor]] = []
        gradients = self._contiguous(grads)
        if kind.dtype == torch.float64 or any(g.dtype == torch.float64 for g in gradients):
            gradients = [g.to(kind.dtype) for g in gradients]
        self._columns = {"p": self._contiguous(params), "g": gradients}

    def _contiguous(self, tensors: Sequence[Tensor], written: bool = False) -> list[Tensor]:
        own = list(map(local_tensor, tensors)) if self.kind.sharded else list(tensors)
        if all(map(Tensor.is_contiguous, own)):
            return own
        result = [t.contiguous() for t in own]
        if written:
            self._copies += [(t, copy) for t, copy in zip(own, result, strict=True) if t is not copy]
        return result

    def only(self, chosen: Sequence[int]) -> Passes:
        """The same for some of its parameters."""
        params, grads = ([column[i] for i in chosen] for column in (self.params, self.grads))
        states = [self.states[i] for i in chosen]
        kind = self.kind.only(tuple(chosen), params, states)
        return Passes(kind, self.group, params, grads, states, self.steps[list(chosen)], self.factor)

    def column(self, name: str) -> list[Tensor]:
        """``p``, ``g``, or the state of this name of each parameter: this process's part."""
        if name not in self._columns:
            self._columns[name] = self._contiguous([state[name] for state in self.states])
        return self._columns[name]

    # Numbers

    def of_step(self, function: Callable[[Any], Any]) -> Operand:
        """A number that depends on the step; one for all parameters where they have come equally far."""
        distinct = {int(step): function(float(step)) for step in np.unique(self.steps)}
        if len(distinct) == 1:
            return float(next(iter(distinct.values())))
        return self.kind.vector([distinct[int(step)] for step in self.steps])

    def spread(self, value: Operand, over: str) -> Operand:
        """A number for each parameter as one for each of its rows or columns."""
        return value.repeat_interleave(self.kind.counts(over)) if isinstance(value, Tensor) else value

    def spread_matrices(self, value: Tensor, over: str) -> Tensor:
        """A number for each matrix (of parameters of more than two dimensions) as one for each row or column."""
        return value.repeat_interleave(self.kind.counts_of_matrices(over))

    def packed(self, name: str) -> Tensor:
        """A state that has a number for each row or column, packed, in fp64."""
        return torch.cat(_flat(self.column(name))).double()

    def unpack(self, name: str, values: Tensor) -> Tensor:
        """Stores a packed vector in such a state, rounded to nearest; returns the stored numbers."""
        column = self.column(name)
        rounded = values.to(column[0].dtype)
        # split() of torch.Tensor looks at types in Python first.
        parts = torch.split_with_sizes(rounded, [t.numel() for t in column])
        torch._foreach_copy_(_flat(column), list(parts))
        return rounded.double()

    # Passes

    def sampled(self, name: str, every: int) -> list[Tensor]:
        """Of a column every so many-th element in row-major order, flat; the column itself for 1."""
        column = self.column(name)
        return column if every == 1 else [t.view(-1)[::every].contiguous() for t in column]

    def sum(
        self,
        what: Quantity,
        over: Sequence[str] = ("all",),
        operands: Mapping[str, Operand] = NONE,
        states: Mapping[str, str] = NONE,
        every: int = 1,
    ) -> tuple[Tensor, ...]:
        """Sums over the whole parameters, one vector for each of ``over``: "rows", "cols", "all".

        ``states`` are the names of the states that the formula reads, by its own names. ``operands`` are its scalars and its
        factors by row and by column, packed. A sum over rows is of a row, along the last dimension. ``every``: of parameter
        and gradient only every so many-th element is taken, as in the states.
        """
        columns = {
            name: self.column(states[name]) if name in states else self.sampled(name, every) for name in what.reads
        }
        found = self._sums(
            what, Matrices(columns, None if every > 1 else self.kind.stacks), over, operands, self.factor
        )
        dims = len(self.kind.shapes[0])
        apart = {"rows": {dims - 1}, "cols": {dims - 2}, "all": None}
        return tuple(sum_over_shards(found[name], self.params[0], apart[name]) for name in over)

    def sum_rows(self, name: str) -> Tensor:
        """The sum of a state with a number for each row, over the rows of each matrix."""
        matrices = Matrices({"g": self.column(name)})
        (total,) = self._sums(ITSELF, matrices, ("rows",), {}, 1.0).values()
        return sum_over_shards(total, self.params[0], {len(self.kind.shapes[0]) - 2})

    def _sums(
        self, what: Quantity, matrices: Matrices, over: Sequence[str], operands: Mapping[str, Operand], factor: float
    ) -> dict[str, Tensor]:
        factors, scalars = self._operands(what, operands)
        return sums.sums(what, matrices, over, factors, scalars, backend=self.backend, factor=factor)

    def _operands(
        self, what: Quantity | Rule, operands: Mapping[str, Operand]
    ) -> tuple[dict[str, Tensor], dict[str, Operand]]:
        named = (*what.by_row, *what.by_col)
        factors = {name: torch.as_tensor(operands[name]).to(self.kind.dtype) for name in named}
        return factors, {name: value for name, value in operands.items() if name not in named}

    def apply(
        self,
        rule: Rule,
        operands: Mapping[str, Operand],
        reads: Mapping[str, Sequence[Tensor]] = NONE,
        target: str | None = None,
    ) -> None:
        """The update of all parameters, or of the state ``target`` (in fp32: it draws no noise).

        ``reads`` are tensors that the rule reads besides the gradient: this process's parts, contiguous.
        """
        first = self.params if target is None else [state[target] for state in self.states]
        written = [first, *([state[spec.name] for state in self.states] for spec in rule.states)]
        self._copies = []
        columns = {f"written{c}": self._contiguous(column, written=True) for c, column in enumerate(written)}
        columns |= {name: list(reads[name]) if name in reads else self.column(name) for name in rule.reads}
        stochastic = rounding_of(self.group["stochastic_rounding"], rule.written)
        factors, scalars = self._operands(rule, operands)
        if factors:
            sums.run_factored(
                rule,
                Matrices(columns, self.kind.stacks),
                self.steps.tolist(),
                factors,
                scalars,
                backend=self.backend,
                factor=self.factor,
                seed=self.group["seed"],
                stochastic=stochastic,
            )
        elif any(t.numel() > 0 for t in columns["written0"]):  # a process may have no part of any parameter
            layouts = self.kind.stacks.layouts if target is None else None
            bucket = self._bucket(list(columns.values()), len(written), rule, scalars, layouts)
            backend = registry.choose(self.backend, self.kind.device, bucket.dtypes)
            backend.run(rule, bucket, seed=self.group["seed"], stochastic=stochastic, read_factor=self.factor)
        for original, copy in self._copies:
            original.copy_(copy)
        self._columns = {"p": columns["written0"] if target is None else self._columns["p"], "g": self._columns["g"]}

    def _bucket(
        self,
        columns: list[list[Tensor]],
        written: int,
        rule: Rule,
        scalars: Mapping[str, Operand],
        layouts: Sequence[Layout] | None,
    ) -> Bucket:
        chosen = [i for i, t in enumerate(columns[0]) if t.numel() > 0]
        flat = [[column[i].view(-1) for i in chosen] for column in columns]
        streams = [self.kind.stacks.streams[i] for i in chosen]
        bucket = Bucket(flat[:written], flat[written:], [layouts[i] if layouts else None for i in chosen], streams)
        values = {name: scalars[name] for name in rule.scalars} if rule.ordered(scalars) else {}
        if self.kind.device.type == "cpu":
            bucket.steps = self.steps[chosen]
            bucket.scalars = scalar_table(rule.scalars, values, len(self.params))[chosen]
        else:
            count = len(self.params)
            rows = [
                v if isinstance(v, Tensor) else torch.full((count,), v, dtype=torch.float64, device=self.kind.device)
                for v in values.values()
            ]
            bucket.scalars = (
                torch.stack(rows, dim=1)[chosen] if rows else torch.empty(count, 0, device=self.kind.device)
            )
            bucket.steps = torch.from_numpy(self.steps[chosen]).to(self.kind.device, non_blocking=True)
        bucket.rows = np.arange(len(chosen))
        return bucket


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    return tensors if all(t.dim() == 1 for t in tensors) else [t.view(-1) for t in tensors]
