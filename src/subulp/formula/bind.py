"""How a backend takes a formula: the same code, with the named functions bound to that backend's own."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Formula = Callable[..., Any]


def bind(
    function: Formula,
    primitives: Mapping[Formula, Any],
    finish: Callable[[types.FunctionType], Any] = lambda twin: twin,
    constant: Callable[[Any], Any] = lambda number: number,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """``finish`` of a twin of the function whose names mean the backend's.

    A name of :data:`subulp.formula.ops.PRIMITIVES` becomes what ``primitives`` has for it, another function the result of
    binding that, and a number of the function's module ``constant`` of itself. ``also`` are more globals of every twin.
    """
    if function in primitives:
        return primitives[function]
    names: dict[str, Any] = {}
    for name, value in _used(function).items():
        if isinstance(value, types.FunctionType):
            names[name] = bind(value, primitives, finish, constant, also)
        elif isinstance(value, (int, float)):
            names[name] = constant(value)
    twin = types.FunctionType(function.__code__, {**function.__globals__, **also, **names}, function.__name__)
    twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    return finish(twin)


def key_of(function: Formula, primitives: Mapping[Formula, Any]) -> Any:
    """Equal for functions that compute the same: their code, and that of the functions they call."""
    if function in primitives:
        return function.__name__
    code = function.__code__
    helpers = [
        (name, key_of(value, primitives) if isinstance(value, types.FunctionType) else value)
        for name, value in _used(function).items()
        if isinstance(value, (types.FunctionType, int, float))
    ]
    return code.co_code, code.co_consts, code.co_names, helpers


def _used(function: Formula) -> dict[str, Any]:
    space = function.__globals__
    return {name: space[name] for name in function.__code__.co_names if name in space}
