"""Which parameters Muon orthogonalises, and as which matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from subulp.options import DEFAULTS, reject_unknown

VIEWS = ("matrix", "flatten", "stack", "auto")

VOCABULARY = 30_000
"""Rows from which a parameter without a name is taken for an embedding or a head: vocabularies begin here."""

NARROW = 256
"""Columns below which it is not: the factor of a LoRA may have as many rows."""

_INPUT = re.compile(r"embed|(^|\.)(emb|wte|wpe)(\.|$)")
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
_HEADS = frozenset(("head", "lm_head", "classifier", "score", "unembed", "output_layer"))
_ENDS = frozenset(("output", "out", "proj_out", "final_layer", "conv_in", "conv_out"))  # if they are the whole model's
_WRAPPERS = frozenset(("module", "model", "transformer", "diffusion_model", "_orig_mod"))
_WRAPPERS |= {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def matrices_of(shape: Sequence[int], view: str) -> tuple[int, int, int] | None:
    """(matrices, rows, columns) of a parameter of this shape under this view; None if it has none."""
    if len(shape) < 2 or (len(shape) > 2 and view == "matrix"):
        return None
    if len(shape) > 2 and (view == "stack" or (view == "auto" and len(shape) == 3)):
        return prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], prod(shape[1:])


def is_hidden(p: Tensor, name: str | None, view: str) -> bool:
    """Whether ``grouping="auto"`` sends a parameter to Muon: see :class:`subulp.Muon`."""
    if matrices_of(p.shape, view) is None:
        return False
    if name is None:
        return not (p.dim() == 2 and p.shape[0] >= VOCABULARY and p.shape[1] >= NARROW)
    parts = [part for part in name.lower().split(".") if part not in _WRAPPERS]
    near, owner = ".".join(parts[-3:]), parts[-2] if len(parts) > 1 else ""
    return not (
        parts[-1].endswith("bias")
        or _INPUT.search(near)
        or _NORM.search(owner)
        or _HEADS.intersection(parts[-3:])
        or parts[0] in _ENDS
    )


def split(group: dict[str, Any], adam: Mapping[str, Any], view: str) -> list[dict[str, Any]]:
    """A group as one for Muon and one for AdamW, which takes the settings ``adam``; without those that would be empty."""
    params = group["params"]
    if isinstance(params, set):
        return [group]  # torch refuses it: it has no order
    items = [params] if isinstance(params, Tensor) else list(params)
    names: Iterable[str | None] = group.get("param_names") or [None] * len(items)
    shares: dict[bool, tuple[list[Any], list[Any]]] = {True: ([], []), False: ([], [])}
    for item, known in zip(items, names, strict=True):
        name, p = item if isinstance(item, tuple) else (known, item)
        chosen, kept = shares[is_hidden(p, name, view)]
        chosen.append(item)
        kept.append(known)
    parts = []
    for hidden, (chosen, kept) in shares.items():
        if chosen:
            part = {**group, "params": chosen, "use_muon": hidden}
            if "param_names" in group:
                part["param_names"] = kept
            if not hidden:
                part.update(adam)
                if "lr" in adam and "initial_lr" in group:
                    part["initial_lr"] = adam["lr"]
            parts.append(part)
    return parts or [{**group, "params": items, "use_muon": False}]


def checked_grouping(value: Any) -> bool:
    """Whether to group; raises for what is neither a name of a grouping nor a bool."""
    if value in (None, False, "none"):
        return False
    if value in (True, "auto"):
        return True
    raise ValueError(f"grouping={value!r}: must be None or 'auto' (or True, which command lines need not quote).")


def checked_adam(value: Any) -> dict[str, Any]:
    """The settings of AdamW groups, by their names in a group."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"adam={value!r} is a {type(value).__name__}: pass a dict of settings, e.g. {{'lr': 3e-4, 'weight_decay': 0.0}}."
        )
    reject_unknown("adam", value, ("lr", "betas", "eps", "weight_decay", *DEFAULTS))
    return dict(value)
