"""Optimizers by name, with values as they come from command lines and configuration files."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from subulp.optimizer import Optimizer, Params
from subulp.rules.adafactor import Adafactor
from subulp.rules.adam import Adam
from subulp.rules.adamw import AdamW
from subulp.rules.came import CAME
from subulp.rules.lion import Lion
from subulp.rules.muon import Muon
from subulp.rules.prodigy import Prodigy
from subulp.rules.sgd import SGD
from subulp.rules.signsgd import SignSGD

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    cls.__name__.lower(): cls for cls in (Adafactor, Adam, AdamW, CAME, Lion, Muon, Prodigy, SGD, SignSGD)
}

_WORDS = {"true": True, "false": False, "yes": True, "no": False, "none": None, "null": None, "inf": float("inf")}


def from_config(name: str, params: Params, **kwargs: Any) -> Optimizer:
    """The optimizer of this name over ``params``.

    ::

        subulp.from_config("adamw", params, lr="1e-4", betas="(0.9, 0.99)", amsgrad="true")

    Args:
        name: a class name in any case; ``-`` and ``_`` are ignored, and so is ``subulp.`` before it.
        params: as for the class.
        kwargs: its keywords. Strings are taken for the number, tuple, bool or None that they spell, else left alone.

    Raises:
        ValueError: no optimizer has this name; the message has the nearest ones.
        TypeError: a keyword does not exist; the message has the nearest ones.
    """
    key = str(name).rpartition(".")[2].lower().replace("-", "").replace("_", "")
    if key not in OPTIMIZERS:
        near = get_close_matches(key, OPTIMIZERS, n=3, cutoff=0.5) or sorted(OPTIMIZERS)
        names = " or ".join(OPTIMIZERS[n].__name__ for n in near)
        raise ValueError(f"There is no optimizer {name!r}. Did you mean {names}?")
    return OPTIMIZERS[key](params, **{option: _spelled(value) for option, value in kwargs.items()})


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
