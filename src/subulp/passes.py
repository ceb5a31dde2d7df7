"""Passes over the parameters of a group: sums over each of them, numbers that follow from sums, and one update of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends import registry, sums
from subulp.backends.bucket import Bucket
from subulp.backends.matrices import Matrices, Operand, scalar_table
from subulp.formula.compose import part, quantity
from subulp.formula.rule import Quantity, Rule
from subulp.numerics.layout import Layout, layout_of, row_major_strides
from subulp.options import rounding_of
from subulp.sharding import sum_over_shards
from subulp.torch_internals import global_block, local_tensor


@part("x")
def itself(g):  # type: ignore[no-untyped-def]
    return g


ITSELF = quantity(itself)


class Passes:
    """Parameters of one group that have equal dtypes, device and sharding, in one step.

    *Packed* vectors have a number for each row ("rows") or column ("cols") of this process's part of every parameter, one
    parameter after the other; "all" vectors have one for each parameter. All of them are fp64 and stay on the device.
    """

    def __init__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        steps: npt.NDArray[np.int64],
        factor: float,
    ) -> None:
        self.group = group
        self.params = params
        self.states = states
        self.steps = steps
        self.factor = factor
        self.device = local_tensor(params[0]).device
        self.dtype = torch.promote_types(params[0].dtype, torch.float32)
        self.backend: str = group["backend"]
        self._blocks = [global_block(p) for p in params]
        self.shapes = [shape for shape, _ in self._blocks]
        """Of the whole parameters."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._columns: dict[str, list[Tensor]] = {}
        self._columns = {"p": self._contiguous(params), "g": [self._gradient(g) for g in self._contiguous(grads)]}
        self.matrices = Matrices(self._columns)

    def _contiguous(self, tensors: Sequence[Tensor], written: bool = False) -> list[Tensor]:
        result = []
        for t in map(local_tensor, tensors):
            own = t.contiguous()
            if own is not t and written:
                self._copies.append((t, own))
            result.append(own)
        return result

    def _gradient(self, g: Tensor) -> Tensor:
        return g.to(self.dtype) if torch.float64 in (g.dtype, self.dtype) else g

    def column(self, name: str) -> list[Tensor]:
        """``p``, ``g``, or the state of this name of each parameter: this process's part."""
        if name not in self._columns:
            self._columns[name] = self._contiguous([state[name] for state in self.states])
        return self._columns[name]

    # Numbers

    @cached_property
    def numel(self) -> Tensor:
        """Elements of each whole parameter."""
        return self.vector([prod(shape) for shape in self.shapes])

    def vector(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)

    def of_step(self, function: Callable[[Any], Any]) -> Operand:
        """A number that depends on the step; one for all parameters where they have come equally far."""
        distinct = {int(step): function(float(step)) for step in np.unique(self.steps)}
        if len(distinct) == 1:
            return float(next(iter(distinct.values())))
        return self.vector([distinct[int(step)] for step in self.steps])

    def spread(self, value: Operand, over: str) -> Operand:
        """A number for each parameter as one for each of its rows or columns."""
        return value.repeat_interleave(self._counts(over)) if isinstance(value, Tensor) else value

    def spread_matrices(self, value: Tensor, over: str) -> Tensor:
        """A number for each matrix (of parameters of more than two dimensions) as one for each row or column."""
        shapes = self.matrices.shapes
        each = np.repeat(shapes[:, 1 if over == "rows" else 2], shapes[:, 0])
        return value.repeat_interleave(torch.from_numpy(each).to(value.device))

    def _counts(self, over: str) -> Tensor:
        counts = self.matrices.rows if over == "rows" else self.matrices.cols
        return torch.from_numpy(counts).to(self.device, non_blocking=True)

    def extent(self, dim: int, over: str) -> Tensor:
        """The size of dimension -1 or -2 of each whole parameter, for each of its rows or columns."""
        sizes = self.vector([shape[dim] for shape in self.shapes])
        return sizes.repeat_interleave(self._counts(over))

    def matrix_extent(self, dim: int) -> Tensor:
        """The size of dimension -1 or -2 of each whole parameter, for each of its matrices."""
        sizes = self.vector([shape[dim] for shape in self.shapes])
        return sizes.repeat_interleave(torch.from_numpy(self.matrices.shapes[:, 0]).to(self.device))

    def packed(self, name: str) -> Tensor:
        """A state that has a number for each row or column, packed, in fp64."""
        return torch.cat([t.view(-1) for t in self.column(name)]).double()

    def unpack(self, name: str, values: Tensor) -> Tensor:
        """Stores a packed vector in such a state, rounded to nearest; returns the stored numbers."""
        column = self.column(name)
        rounded = values.to(column[0].dtype)
        parts = rounded.split([t.numel() for t in column])
        torch._foreach_copy_([t.view(-1) for t in column], list(parts))
        return rounded.double()

    # Passes

    def sampled(self, name: str, every: int) -> list[Tensor]:
        """Of a column every so many-th element in row-major order, flat; the column itself for 1."""
        column = self.column(name)
        return column if every == 1 else [t.view(-1)[::every].contiguous() for t in column]

    def sum(
        self,
        what: Quantity,
        *over: str,
        states: Mapping[str, str] | None = None,
        every: int = 1,
        **operands: Operand,
    ) -> tuple[Tensor, ...]:
        """Sums over the whole parameters, one vector for each of ``over``: "rows", "cols", "all".

        ``states`` are the names of the states that the formula reads, by its own names. ``operands`` are its scalars and its
        factors by row and by column, packed. A sum over rows is of a row, along the last dimension. ``every``: of parameter
        and gradient only every so many-th element is taken, as in the states.
        """
        names = states or {}
        columns = {
            name: self.column(names[name]) if name in names else self.sampled(name, every) for name in what.reads
        }
        found = self._sums(what, Matrices(columns), over, operands, self.factor)
        dims = len(self.shapes[0])
        apart = {"rows": {dims - 1}, "cols": {dims - 2}, "all": None}
        return tuple(sum_over_shards(found[name], self.params[0], apart[name]) for name in over)

    def sum_rows(self, name: str) -> Tensor:
        """The sum of a state with a number for each row, over the rows of each matrix."""
        matrices = Matrices({"g": self.column(name)})
        (total,) = self._sums(ITSELF, matrices, ("rows",), {}, 1.0).values()
        return sum_over_shards(total, self.params[0], {len(self.shapes[0]) - 2})

    def _sums(
        self, what: Quantity, matrices: Matrices, over: Sequence[str], operands: Mapping[str, Operand], factor: float
    ) -> dict[str, Tensor]:
        factors, scalars = self._operands(what, operands)
        return sums.sums(what, matrices, over, factors, scalars, backend=self.backend, factor=factor)

    def _operands(
        self, what: Quantity | Rule, operands: Mapping[str, Operand]
    ) -> tuple[dict[str, Tensor], dict[str, Operand]]:
        named = (*what.by_row, *what.by_col)
        factors = {name: torch.as_tensor(operands[name]).to(self.dtype) for name in named}
        return factors, {name: value for name, value in operands.items() if name not in named}

    def apply(
        self,
        rule: Rule,
        reads: Mapping[str, Sequence[Tensor]] | None = None,
        target: str | None = None,
        **operands: Operand,
    ) -> None:
        """The update of all parameters, or of the state ``target``.

        ``reads`` are tensors that the rule reads besides the gradient: this process's parts, contiguous.
        """
        first = self.params if target is None else [state[target] for state in self.states]
        written = [first, *([state[spec.name] for state in self.states] for spec in rule.states)]
        self._copies = []
        columns = {f"written{c}": self._contiguous(column, written=True) for c, column in enumerate(written)}
        columns |= {name: (reads or {}).get(name) or self.column(name) for name in rule.reads}
        stochastic = rounding_of(self.group["stochastic_rounding"], rule.written)
        options = {"seed": self.group["seed"], "stochastic": stochastic}
        factors, scalars = self._operands(rule, operands)
        if factors:
            arguments = (Matrices(columns), self.layouts, self.streams, self.steps, factors, scalars)
            sums.run_factored(rule, *arguments, backend=self.backend, factor=self.factor, **options)
        else:
            bucket = self._bucket(list(columns.values()), len(written), rule, scalars)
            backend = registry.choose(self.backend, self.device, bucket.dtypes)
            backend.run(rule, bucket, read_factor=self.factor, **options)
        for original, copy in self._copies:
            original.copy_(copy)
        self._columns = {"p": columns["written0"] if target is None else self._columns["p"], "g": self._columns["g"]}

    def _bucket(self, columns: list[list[Tensor]], written: int, rule: Rule, scalars: Mapping[str, Operand]) -> Bucket:
        chosen = [i for i, t in enumerate(columns[0]) if t.numel() > 0]
        flat = [[column[i].view(-1) for i in chosen] for column in columns]
        streams = [self.streams[i] for i in chosen]
        bucket = Bucket(flat[:written], flat[written:], [self.layouts[i] for i in chosen], streams)
        values = {name: scalars[name] for name in rule.scalars} if rule.ordered(scalars) else {}
        if self.device.type == "cpu":
            bucket.steps = self.steps[chosen]
            bucket.scalars = scalar_table(rule.scalars, values, len(self.params))[chosen]
        else:
            count = len(self.params)
            rows = [
                v if isinstance(v, Tensor) else torch.full((count,), v, dtype=torch.float64, device=self.device)
                for v in values.values()
            ]
            bucket.scalars = torch.stack(rows, dim=1)[chosen] if rows else torch.empty(count, 0, device=self.device)
            bucket.steps = torch.from_numpy(self.steps[chosen]).to(self.device, non_blocking=True)
        bucket.rows = np.arange(len(chosen))
        return bucket

    @cached_property
    def layouts(self) -> list[Layout]:
        shapes = [tuple(local_tensor(p).shape) for p in self.params]
        return [
            layout_of(shape, row_major_strides(shape), whole, offset)
            for shape, (whole, offset) in zip(shapes, self._blocks, strict=True)
        ]

    @cached_property
    def streams(self) -> list[int]:
        return [int(state["stream"]) for state in self.states]
