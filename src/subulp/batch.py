"""What one step updates together: parameters, of one group or of several, that take the same launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Group = dict[str, Any]
Scalars = Callable[[Group, Any], Sequence[Any]]


class Batch:
    """Parameters with gradients, in the order of their groups.

    ``key`` is the same at every step for the same groups; ``places`` say of each group where it is, for messages.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self.groups: list[Group] = []
        self.counts: list[int] = []
        self.places: list[str] = []
        self.tensors: list[bool] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []

    def add(
        self, group: Group, params: Sequence[Tensor], grads: Sequence[Tensor], place: str, tensors: bool = True
    ) -> None:
        """Adds a group's parameters; ``tensors``: whether a hyper-parameter may be a tensor."""
        self.groups.append(group)
        self.counts.append(len(params))
        self.places.append(place)
        self.tensors.append(tensors)
        self.params += params
        self.grads += grads

    @property
    def group(self) -> Group:
        """A group whose common options are those of all."""
        return self.groups[0]

    def owners(self) -> list[Group]:
        """The group of each parameter."""
        return [group for group, count in zip(self.groups, self.counts, strict=True) for _ in range(count)]

    def where(self) -> list[str]:
        """The place of each parameter."""
        return [place for place, count in zip(self.places, self.counts, strict=True) for _ in range(count)]

    def keep(self, chosen: Sequence[bool]) -> None:
        """Leaves out the parameters that are not chosen."""
        self.params, self.grads = list(compress(self.params, chosen)), list(compress(self.grads, chosen))
        starts = np.cumsum([0, *self.counts])
        self.counts = [int(sum(chosen[a:b])) for a, b in pairwise(starts)]

    def scalar_rows(
        self, scalars: Scalars, steps: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The scalars of each distinct (group, step), shape (rows, scalars), and the row of each parameter."""
        groups = [
            numbers(group) if tensors else group for group, tensors in zip(self.groups, self.tensors, strict=True)
        ]
        first = float(steps[0])
        if len(steps) == 1 or (steps == steps[0]).all():
            count = len(groups)
            rows = np.zeros(len(steps), np.int64) if count == 1 else np.repeat(np.arange(count), self.counts)
            return np.array([scalars(group, first) for group in groups]), rows
        table: list[Any] = []
        rows = np.empty(len(steps), dtype=np.int64)
        start = 0
        for group, count in zip(groups, self.counts, strict=True):
            distinct, own = np.unique(steps[start : start + count], return_inverse=True)
            rows[start : start + count] = own.reshape(-1) + len(table)
            table += [scalars(group, float(step)) for step in distinct]
            start += count
        return np.array(table), rows


def numbers(group: Group) -> Group:
    """The group with hyper-parameters that are tensors read as numbers; the group itself if none is."""
    return map_tensors(group, lambda t: t.detach().item() if t.numel() == 1 else t)


def map_tensors(group: Group, change: Callable[[Tensor], Any]) -> Group:
    """The group with ``change`` applied to hyper-parameters that are tensors, in tuples and lists too."""
    changed = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor):
            changed[name] = change(value)
        elif isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            changed[name] = tuple(change(item) if isinstance(item, Tensor) else item for item in value)
    return {**group, **changed} if changed else group
