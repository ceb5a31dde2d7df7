"""Rules made of small named parts: an option of an optimizer is one part more, not twice as many formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

from subulp.formula.define import define
from subulp.formula.rule import AXES, Quantity, Rule, State


@dataclass(frozen=True)
class Part:
    """A formula with named arguments and results: ``name, ... = function(name, ...)``."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: tuple[tuple[str, str], ...] = ()
    """Of inputs that are neither elementwise nor the same for a whole launch, what they have one number for."""

    def of(self, **names: str) -> Part:
        """The same formula with other names: ``direction.of(v="v_max")`` reads ``v_max`` for ``v``.

        A name that is both read and returned is renamed in both places.

        Raises:
            ValueError: a name that the part does not have.
        """
        known = {*self.inputs, *self.outputs}
        for name in names:
            if name not in known:
                raise ValueError(f"{name}={names[name]!r}: the part {self} has {sorted(known)} only.")

        def renamed(old: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in old)

        axes = tuple((names.get(name, name), axis) for name, axis in self.axes)
        return Part(self.function, renamed(self.inputs), renamed(self.outputs), axes)

    def to(self, *outputs: str) -> Part:
        """The same formula whose results have other names; what it reads keeps its names."""
        if len(outputs) != len(self.outputs):
            raise ValueError(f"{outputs}: the part {self} has {len(self.outputs)} results.")
        return replace(self, outputs=outputs)

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}"

    def __call__(self, *args: Any) -> Any:
        """The formula itself."""
        return self.function(*args)


def part(
    *outputs: str,
    by_row: Sequence[str] = (),
    by_col: Sequence[str] = (),
    per_tensor: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Part]:
    """Makes a formula a part that gives these names.

    Its parameters are the names that it reads. Those in ``by_row`` have one number for each row of a matrix, those in
    ``by_col`` one for each column; ``per_tensor`` come from a sum over the whole tensor: one for each tensor, where other
    scalars have one for each group and step.
    """
    axes = [(name, axis) for axis, names in zip(AXES, (by_row, by_col, per_tensor), strict=True) for name in names]

    def made(function: Callable[..., Any]) -> Part:
        inputs = tuple(signature(function).parameters)
        if surplus := {name for name, _ in axes} - set(inputs):
            raise ValueError(f"{sorted(surplus)} of {function.__name__}{inputs}: no such arguments.")
        return Part(function, inputs, outputs, tuple(axes))

    return made


def compose(
    *parts: Part,
    states: Mapping[str, State] | None = None,
    reads: Sequence[str] = ("g",),
    keeps_nonfinite: bool = True,
    raw: bool = False,
) -> Rule:
    """The rule that computes the parts one after the other.

    ``p`` is the parameter, ``reads`` are tensors that are read, ``states`` have the names that parts know them by. Every
    other name that a part reads before one has given it is a scalar. The new ``p`` and states are what the names hold at the
    end.
    The same parts give the same rule, so that what is kept by rule (kernels, plans) holds.

    Raises:
        ValueError: no part gives ``p`` or one of the states, a part gives a name that nothing uses, or a name has two axes.
    """
    return _compose(parts, tuple((states or {}).items()), tuple(reads), keeps_nonfinite, raw)


@cache
def _compose(
    parts: tuple[Part, ...],
    states: tuple[tuple[str, State], ...],
    reads: tuple[str, ...],
    keeps_nonfinite: bool,
    raw: bool,
) -> Rule:
    written = ("p", *(name for name, _ in states))
    formula, columns, rows, _, axes = _formula(parts, (*written, *reads), written, f"({', '.join(written)},)")
    return Rule(
        formula,
        tuple(state for _, state in states),
        reads=reads,
        by_col=columns,
        by_row=rows,
        per_tensor=tuple(name for name, axis in axes.items() if axis == "per_tensor"),
        keeps_nonfinite=keeps_nonfinite,
        raw=raw,
    )


def quantity(*parts: Part, reads: Sequence[str] = ("g",)) -> Quantity:
    """What the last part gives, for sums over the elements. Arguments as in :func:`compose`; nothing is written."""
    return _quantity(parts, tuple(reads))


@cache
def _quantity(parts: tuple[Part, ...], reads: tuple[str, ...]) -> Quantity:
    result = parts[-1].outputs
    formula, columns, rows, scalars, _ = _formula(parts, reads, result, result[0])
    return Quantity(formula, reads, columns, rows, scalars)


def _formula(
    parts: Sequence[Part], elementwise: Sequence[str], results: Sequence[str], returned: str
) -> tuple[Any, tuple[str, ...], tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """The function of the parts, the names of what it takes by column, by row and as scalars, and the axes of all these."""
    axes = _axes(parts, {*elementwise})
    known = {*elementwise}
    others: list[str] = []
    for each in parts:
        others += [name for name in dict.fromkeys(each.inputs) if name not in known and name not in others]
        known |= {*each.outputs}
    _check(parts, results)
    columns, rows = (tuple(name for name in others if axes.get(name) == axis) for axis in ("by_col", "by_row"))
    scalars = tuple(name for name in others if name not in (*columns, *rows))
    arguments = (*elementwise, *columns, *rows, *scalars)
    # Names come from other code: prefixed, none of them hides a part.
    lines = [f"    {_names(each.outputs)} = part{i}({_names(each.inputs)})" for i, each in enumerate(parts)]
    name = "_".join(each.function.__name__.replace("<lambda>", "anonymous") for each in parts)
    text = "\n".join([f"def {name}({_names(arguments)}):", *lines, f"    return {returned}", ""])
    function = define(name, text, {f"part{i}": each.function for i, each in enumerate(parts)})
    return function, columns, rows, scalars, axes


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


def _axes(parts: Sequence[Part], elementwise: set[str]) -> dict[str, str]:
    axes: dict[str, str] = {}
    for each in parts:
        for name, axis in each.axes:
            if name in elementwise or axes.setdefault(name, axis) != axis:
                other = "elementwise" if name in elementwise else axes[name]
                raise ValueError(f"{name} is {other} and, in {each}, {axis}: rename one of them with .of().")
    return axes


def _check(parts: Sequence[Part], written: Sequence[str]) -> None:
    needed = set(written)
    for each in reversed(parts):
        if not needed & {*each.outputs}:
            raise ValueError(f"Nothing uses what {each} gives: order the parts, or rename with .of().")
        needed = (needed - {*each.outputs}) | {*each.inputs}
    given = {name for each in parts for name in each.outputs}
    if missing := [name for name in written if name not in given]:
        raise ValueError(f"No part gives {missing}: the parts are {', '.join(map(str, parts))}.")
