"""The launch plan of a parameter group: tables made once, revalidated every step.

Trainers re-point parameters, swap states and free gradients between steps. So a plan keeps addresses and identities, never
tensors, and :meth:`Plan.gather` compares every identity, data pointer and dtype with what the tensors have now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.numba.launch import Launch, advance
from subulp.batch import Batch, Scalars
from subulp.formula.rule import Rule
from subulp.torch_internals import mark_written

Columns = list[Sequence[Tensor]]

_COUNTERS = 2
"""The columns before the target: step and stream."""


class Plan:
    """Launches for parameters that are all simple (``subulp.checks.is_plain``) and all on the CPU.

    ``choices`` are the groups' (stochastic_rounding, backend).
    """

    def __init__(
        self,
        rule: Rule,
        batch: Batch,
        states: Sequence[Mapping[str, Any]],
        stochastic: bool | tuple[bool, ...],
        choices: tuple[bool | str, str],
    ) -> None:
        self.rule = rule
        self.choices = choices
        self.names = [spec.name for spec in rule.states]
        self.sizes = [p.numel() for p in batch.params]
        self.shapes = [p.shape for p in batch.params]
        self.numels = self.sizes * (1 + len(self.names))  # of targets and states
        columns = self.columns(batch, states)
        self.ids = list(map(id, chain(*columns)))
        self.dtypes = [t.dtype for t in chain(*columns, batch.grads)]
        self.pointers = self._pointers(columns, batch.grads)
        keys = list(zip(*([t.dtype for t in column] for column in (*columns[_COUNTERS:], batch.grads)), strict=True))
        members: dict[tuple[torch.dtype, ...], list[int]] = {}
        for i, key in enumerate(keys):
            if self.sizes[i] > 0:
                members.setdefault(key, []).append(i)
        self.launches = [
            (
                slice(None) if len(chosen) == len(batch.params) else np.array(chosen),
                Launch(rule, key, stochastic, [self.sizes[i] for i in chosen], [None] * len(chosen)),
            )
            for key, chosen in members.items()
        ]

    def gather(
        self, rule: Rule, batch: Batch, states: Sequence[Mapping[str, Any]], choices: tuple[bool | str, str]
    ) -> Columns | None:
        """The columns, if the plan still fits; it has taken up the gradients' new addresses then. Else None."""
        grads = batch.grads
        if rule is not self.rule or choices != self.choices or len(batch.params) != len(self.sizes):
            return None
        try:
            columns = self.columns(batch, states)
            if (
                list(map(id, chain(*columns))) != self.ids
                or [t.dtype for t in chain(*columns, grads)] != self.dtypes
                or set(map(type, grads)) != {Tensor}
                or not all(map(Tensor.is_contiguous, chain(*columns[_COUNTERS:], grads)))
                or list(map(Tensor.numel, chain(*columns[_COUNTERS:]))) != self.numels
                or [g.shape for g in grads] != self.shapes
                or not all(g.is_cpu for g in grads)
            ):
                return None
            pointers = self._pointers(columns, grads)
        except (KeyError, RuntimeError):  # a state is missing; a sparse gradient has no data pointer
            return None
        fixed = len(columns)
        if not (pointers[:fixed] == self.pointers[:fixed]).all():
            return None
        self.pointers = pointers
        return columns

    def step(self, batch: Batch, columns: Columns, scalars: Scalars, seed: int, factor: float) -> None:
        """Counts the step and updates everything."""
        steps, streams = advance(self.pointers)
        table, rows = batch.scalar_rows(scalars, steps)
        pointers = np.ascontiguousarray(self.pointers[_COUNTERS:].T)  # the kernel's order: target, states, gradient
        for chosen, launch in self.launches:
            whole = isinstance(chosen, slice)
            launch(
                pointers if whole else pointers[chosen],
                table,
                rows if whole else rows[chosen],
                streams if whole else streams[chosen],
                steps if whole else steps[chosen],
                seed,
                factor,
            )
        mark_written(chain(columns[0], *columns[_COUNTERS:]))

    def columns(self, batch: Batch, states: Sequence[Mapping[str, Any]]) -> Columns:
        """Steps, streams, targets and states of the batch's parameters."""
        return [
            [state["step"] for state in states],
            [state["stream"] for state in states],
            batch.params,
            *([state[name] for state in states] for name in self.names),
        ]

    @staticmethod
    def _pointers(columns: Columns, grads: Sequence[Tensor]) -> npt.NDArray[np.int64]:
        count = (len(columns) + 1) * len(grads)
        flat = np.fromiter(map(Tensor.data_ptr, chain(*columns, grads)), np.int64, count)
        return flat.reshape(len(columns) + 1, len(grads))
