"""The launch plan of a parameter group: tables made once, revalidated every step.

Trainers re-point parameters, swap states and free gradients between steps. So a plan keeps addresses and identities, never
tensors, and :meth:`Plan.gather` compares every identity, data pointer and dtype with what the tensors have now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subulp.backends.numba_cpu import Launch, advance
from subulp.rules.rule import Rule


class Plan:
    """Launches for parameters that are all simple (``subulp.checks.is_plain``) and all on the CPU.

    ``choices`` are the group's (stochastic_rounding, backend).
    """

    def __init__(
        self,
        rule: Rule,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Any]],
        choices: tuple[bool, str],
    ) -> None:
        self.rule = rule
        self.choices = choices
        self.names = [spec.name for spec in rule.states]
        self.sizes = [p.numel() for p in params]
        self.numels = self.sizes * (2 + len(self.names))  # of targets, states and gradients
        self.streams = [state["stream"] for state in states]
        columns = self._columns(params, states)
        self.ids = list(map(id, chain(*columns)))
        self.dtypes = [t.dtype for t in chain(*columns[1:], grads)]
        self.pointers = self._pointers(columns, grads)
        keys = list(zip(*([t.dtype for t in column] for column in (*columns[1:], grads)), strict=True))
        members: dict[tuple[torch.dtype, ...], list[int]] = {}
        for i, key in enumerate(keys):
            if self.sizes[i] > 0:
                members.setdefault(key, []).append(i)
        self.launches = [
            (
                slice(None) if len(chosen) == len(params) else np.array(chosen),
                Launch(
                    rule,
                    key,
                    choices[0],
                    [self.sizes[i] for i in chosen],
                    [None] * len(chosen),
                    [self.streams[i] for i in chosen],
                ),
            )
            for key, chosen in members.items()
        ]

    def gather(
        self,
        rule: Rule,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Any]],
        choices: tuple[bool, str],
    ) -> bool:
        """Whether the plan still fits. If so, it has taken up the gradients' new addresses."""
        if rule is not self.rule or choices != self.choices or len(params) != len(self.sizes):
            return False
        try:
            columns = self._columns(params, states)
            if (
                list(map(id, chain(*columns))) != self.ids
                or [t.dtype for t in chain(*columns[1:], grads)] != self.dtypes
                or set(map(type, grads)) != {Tensor}
                or not all(map(Tensor.is_contiguous, chain(*columns[1:], grads)))
                or list(map(Tensor.numel, chain(*columns[1:], grads))) != self.numels
                or not all(g.is_cpu for g in grads)
                or [state["stream"] for state in states] != self.streams
            ):
                return False
            pointers = self._pointers(columns, grads)
        except (KeyError, RuntimeError):  # a state is missing; a sparse gradient has no data pointer
            return False
        fixed = len(columns)
        if not (pointers[:fixed] == self.pointers[:fixed]).all():
            return False
        self.pointers = pointers
        return True

    def step(
        self, scalars_at: Callable[[npt.NDArray[np.int64]], tuple[Any, Any]], seed: int, read_factor: float
    ) -> None:
        """Counts the step and updates everything; ``scalars_at(steps)`` gives the scalar rows and each tensor's row."""
        steps = advance(self.pointers[0])
        scalars, rows = scalars_at(steps)
        table = np.ascontiguousarray(self.pointers[1:].T)  # the kernel's order: target, states, gradient
        for chosen, launch in self.launches:
            whole = isinstance(chosen, slice)
            launch(
                table if whole else table[chosen],
                scalars,
                rows if whole else rows[chosen],
                steps if whole else steps[chosen],
                seed,
                read_factor,
            )

    def _columns(self, params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> list[Sequence[Tensor]]:
        return [
            [state["step"] for state in states],
            params,
            *([state[name] for state in states] for name in self.names),
        ]

    @staticmethod
    def _pointers(columns: Sequence[Sequence[Tensor]], grads: Sequence[Tensor]) -> npt.NDArray[np.int64]:
        count = (len(columns) + 1) * len(grads)
        flat = np.fromiter(map(Tensor.data_ptr, chain(*columns, grads)), np.int64, count)
        return flat.reshape(len(columns) + 1, len(grads))
