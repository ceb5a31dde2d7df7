"""Optimizers by name, with values as they come from command lines and configuration files."""

from __future__ import annotations

import ast
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from subulp.optimizer import Optimizer, Params

_WORDS = {"true": True, "false": False, "yes": True, "no": False, "none": None, "null": None, "inf": float("inf")}


def from_config(name: str, params: Params, **kwargs: Any) -> Optimizer:
    """The optimizer of this name over ``params``.

    ::

        subulp.from_config("adamw", params, lr="1e-4", betas="(0.9, 0.99)", amsgrad="true")
        subulp.from_config("muon", model.named_parameters(), lr="0.02", grouping="auto", adam="{'lr': 3e-4}")

    Args:
        name: a class name in any case; ``-`` and ``_`` are ignored, and so is ``subulp.`` before it.
        params: as for the class.
        kwargs: its keywords. Strings are taken for the number, tuple, bool or None that they spell, else left alone.

    Raises:
        ValueError: no optimizer has this name; the message has the nearest ones.
        TypeError: a keyword does not exist; the message has the nearest ones.
    """
    known = _exported()
    key = str(name).rpartition(".")[2].lower().replace("-", "").replace("_", "")
    if key not in known:
        near = get_close_matches(key, known, n=3, cutoff=0.5) or sorted(known)
        names = " or ".join(known[n].__name__ for n in near)
        raise ValueError(f"There is no optimizer {name!r}. Did you mean {names}?")
    return known[key](params, **{option: _spelled(value) for option, value in kwargs.items()})


def _exported() -> dict[str, type[Optimizer]]:
    """The optimizers among the library's public names, by name in lower case."""
    library = import_module("subulp")
    exported = (getattr(library, name) for name in library.__all__)
    return {cls.__name__.lower(): cls for cls in exported if isinstance(cls, type) and issubclass(cls, Optimizer)}


def _spelled(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
