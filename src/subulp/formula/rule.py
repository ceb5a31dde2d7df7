"""What a backend needs to know of an elementwise update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from math import prod
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class State:
    """A state tensor of the parameter's shape, or of that shape with one dimension averaged away."""

    name: str
    squared: bool = False
    """Holds squares of gradients: needs fp32's exponent range, which fp16 has not."""
    fp32: bool = False
    """Always stored in fp32, whatever ``state_dtype`` says: it is small, or what it says would break it."""
    own: bool = False
    """Always stored in the parameter's dtype: it is a copy of the parameter."""
    averaged: int | None = None
    """The dimension (-1 or -2) that is averaged away; None: none is."""

    every: int = 1
    """One element is kept for so many of the flattened parameter's; the state is flat then."""
    restarts: bool = False
    """May begin anew in the middle of a run."""
    alias: str | None = None
    """Its name in the checkpoints of another implementation, which may keep the averaged dimension with size 1."""

    def shape(self, param_shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of the state of a parameter of this global shape."""
        if self.every > 1:
            return (-(-prod(param_shape) // self.every),)
        shape = list(param_shape)
        if self.averaged is not None:
            del shape[self.averaged]
        return tuple(shape)

    def found_in(self, entry: Mapping[str, Any], param_shape: Sequence[int]) -> Any:
        """This state in a parameter's entry of a checkpoint, under either name; None if it is not there."""
        value = entry.get(self.name)
        if value is not None or self.alias is None:
            return value
        value = entry.get(self.alias)
        if self.averaged is not None and isinstance(value, Tensor):
            kept = list(param_shape)
            kept[self.averaged] = 1
            if list(value.shape) == kept:
                return value.squeeze(self.averaged)
        return value


AXES = ("by_row", "by_col", "per_tensor")
"""What an argument may have one number for, besides the element and the launch."""


@dataclass(frozen=True)
class Rule:
    """An elementwise update ``formula(p, *states, *reads, *by_col, *by_row, *scalars) -> (p, *states)``.

    The formula is one plain function over ``+ - *``, comparisons and the names in ``subulp.formula.ops``. Every backend
    compiles this very function between a generic load to fp32 and a generic store. The written tensors, the target first,
    take noise slots 0, 1, 2, ...
    """

    formula: Callable[..., Any]
    states: tuple[State, ...] = ()
    reads: tuple[str, ...] = ("g",)
    """The names of the tensors that are only read, as in the formula."""
    by_col: tuple[str, ...] = ()
    """The names of what has one number for each column of a matrix."""
    by_row: tuple[str, ...] = ()
    """The names of what has one number for each row of a matrix."""
    scalars: tuple[str, ...] = field(init=False)
    """The names of the formula's other arguments."""
    per_tensor: tuple[str, ...] = ()
    """Those of the scalars that come from a sum over the tensor."""
    keeps_nonfinite: bool = True
    """An Inf or NaN already in the target stays as it is, to the bit (decay would make Inf - Inf)."""
    raw: bool = False
    """Stored values may come straight from a read tensor, so that a signalling NaN may reach the store."""

    def __post_init__(self) -> None:
        names = tuple(signature(self.formula).parameters)
        given = 1 + len(self.states)
        named = (*self.reads, *self.by_col, *self.by_row)
        scalars = names[given + len(named) :]
        if names[given : given + len(named)] != named or not {*self.per_tensor} <= {*scalars}:
            raise ValueError(
                f"{self.formula.__name__}{names} with {len(self.states)} states and {named}: the arguments are the "
                "parameter, the states, what is read, by column, by row, the scalars, in this order."
            )
        object.__setattr__(self, "scalars", scalars)

    def ordered(self, scalars: Mapping[str, Any]) -> tuple[Any, ...]:
        """The scalars in the order of the formula's arguments.

        Raises:
            ValueError: one is missing, or there is one that the formula does not take.
        """
        return _ordered(self.scalars, scalars)

    def by_elements(self) -> Rule:
        """The same where factors by row and column are tensors of the parameter's shape that are read."""
        return replace(self, reads=(*self.reads, *self.by_col, *self.by_row), by_col=(), by_row=())

    def by_rows(self) -> Rule:
        """The same for a row, as a tensor: factors by column are read, those by row are scalars."""
        return replace(self, reads=(*self.reads, *self.by_col), by_col=(), by_row=())

    @property
    def written(self) -> tuple[str, ...]:
        """The names of what is written: "param", then the states."""
        return ("param", *(state.name for state in self.states))


@dataclass(frozen=True)
class Quantity:
    """A number for each element, to be summed: ``formula(*reads, *by_col, *by_row, *scalars) -> number``."""

    formula: Callable[..., Any]
    reads: tuple[str, ...]
    by_col: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    def ordered(self, scalars: Mapping[str, Any]) -> tuple[Any, ...]:
        """As :meth:`Rule.ordered`."""
        return _ordered(self.scalars, scalars)


def _ordered(names: tuple[str, ...], scalars: Mapping[str, Any]) -> tuple[Any, ...]:
    if scalars.keys() != set(names):
        raise ValueError(f"Scalars {list(scalars)} for a formula that takes {list(names)}.")
    return tuple(scalars[name] for name in names)


def slots(stochastic: bool | tuple[bool, ...], written: int) -> tuple[bool, ...]:
    """Whether each written tensor is rounded stochastically, from one answer for all or one each."""
    return (stochastic,) * written if isinstance(stochastic, bool) else stochastic
