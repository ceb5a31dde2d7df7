"""Loading state without losing a bit.

``torch.optim.Optimizer.load_state_dict`` casts every state tensor but "step" to the parameter's dtype: fp32 states under
bf16 parameters lose 16 bits, integers are rounded. It hands through what it does not know, so the tensors travel in boxes
which are opened afterwards under our own policy: each state gets the dtype in which the optimizer stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subulp.checks import check_state
from subulp.formula.rule import State
from subulp.sharding import counter_device, like_state

StateDict = dict[str, Any]


class _Box:
    """A tensor that torch's cast does not see."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def check_form(state_dict: Any) -> None:
    """Raises TypeError or ValueError, saying what was passed instead, for what is no optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        shown = repr(state_dict) if isinstance(state_dict, (str, type(None))) else f"a {type(state_dict).__name__}"
        raise TypeError(
            f"load_state_dict got {shown}: pass the dict that optimizer.state_dict() returned; torch.load(path) reads a file."
        )


def _check_entries(state_dict: StateDict) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if not missing:
        return
    inner = [key for key, value in state_dict.items() if isinstance(value, Mapping) and "param_groups" in value]
    if inner:
        hint = f"it is a whole training checkpoint; pass its entry {inner[0]!r}."
    elif state_dict and all(isinstance(value, Tensor) for value in state_dict.values()):
        hint = "it is a model's state dict; pass it to the model, and what optimizer.state_dict() returned here."
    else:
        hint = "pass what optimizer.state_dict() returned."
    raise ValueError(f"The state dict has no {missing[0]!r}: {hint}")


def pack(optimizer: Any, state_dict: StateDict) -> StateDict:
    """The state dict with boxed tensors, and with the options that its groups lack taken from the optimizer's own.

    Raises ValueError if a hyper-parameter or a state is wrong; the optimizer is untouched then.
    """
    _check_entries(state_dict)
    groups = [dict(group) for group in state_dict["param_groups"]]
    try:
        for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
            for key, value in own.items():
                if key in optimizer.defaults or key in optimizer._checks:
                    group.setdefault(key, value)
            optimizer._check(
                {k: v for k, v in group.items() if k != "params"}, f" (param group {number} of the checkpoint)"
            )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{error}{_origin(optimizer, state_dict)}") from None
    pairs = dict(_pairs(groups, optimizer.param_groups))
    state: dict[Any, Any] = {}
    for key, entry in state_dict["state"].items():
        if key in pairs and isinstance(entry, dict):
            try:
                p, group = pairs[key]
                entry = _packed(optimizer, p, group, entry, key)
            except ValueError as error:
                raise ValueError(f"{error}{_origin(optimizer, state_dict)}") from None
        state[key] = entry
    return {**state_dict, "state": state, "param_groups": groups}


def _packed(optimizer: Any, p: Tensor, group: dict[str, Any], entry: StateDict, key: Any) -> StateDict:
    """A parameter's entry, checked, under our names, its tensors boxed."""
    where = f", parameter {key} of the checkpoint"
    entry = {k: v for k, v in entry.items() if v is not None}  # torch's SGD keeps a None without momentum
    specs = optimizer.states(group, p)
    found = {s: like_state(v, p, s) for s in specs if (v := s.found_in(entry, p.shape)) is not None}
    check_state(p, found, where)
    if "step" in entry:
        entry["step"] = torch.tensor(_check_step(entry["step"], where), dtype=torch.float64)
    _check_complete(entry, key, specs, [spec for spec in specs if spec not in found])
    foreign = {spec.alias for spec in found} - {spec.name for spec in specs}
    entry = {k: v for k, v in entry.items() if k not in foreign}
    entry.update((spec.name, value) for spec, value in found.items())
    if "stream" in entry:
        stream = entry["stream"]
        if isinstance(stream, Tensor) and stream.is_floating_point():
            # torch casts what it does not know to the parameter's dtype. Nothing is left of a stream, and it is chosen anew.
            del entry["stream"]
        else:
            entry["stream"] = torch.tensor(_check_stream(stream, where))
    return {k: _Box(v) if isinstance(v, Tensor) else v for k, v in entry.items()}


def unpack(optimizer: Any, storage_dtype: Callable[..., torch.dtype]) -> None:
    """Opens the boxes in ``optimizer.state``; brings groups and counters of other versions to today's form."""
    for group in optimizer.param_groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
        for p in group["params"]:
            entry = optimizer.state.get(p)
            if not entry:
                continue
            specs = {spec.name: spec for spec in optimizer.states(group, p)}
            # Copies: the caller's state dict must not count along.
            for name, value in list(entry.items()):
                tensor = value.tensor if isinstance(value, _Box) else value
                if name == "step":
                    entry[name] = torch.as_tensor(tensor, dtype=torch.float64).to(counter_device(p, group), copy=True)
                elif name == "stream":
                    entry[name] = torch.as_tensor(tensor, dtype=torch.int64).to("cpu", copy=True)
                elif isinstance(value, _Box):
                    dtype = storage_dtype(p, specs[name], group) if name in specs else tensor.dtype
                    entry[name] = tensor.to(device=p.device, dtype=dtype, copy=True)


def _pairs(
    saved: list[dict[str, Any]], own: list[dict[str, Any]]
) -> Iterator[tuple[Any, tuple[Tensor, dict[str, Any]]]]:
    """(key in the checkpoint, (parameter, checkpoint group)), by position, as torch maps them."""
    for group, own_group in zip(saved, own, strict=False):
        for key, p in zip(group["params"], own_group["params"], strict=False):
            yield key, (p, group)


def _check_step(value: Any, where: str) -> float:
    """A count as a number: an integer in [0, 2**53), which torch stores as a float."""
    number = _number(value)
    if number is None or not 0 <= number < 1 << 53 or number != int(number):
        raise ValueError(f"step={value!r}{where}: must be one whole number in [0, 2**53).")
    return float(number)


def _check_stream(value: Any, where: str) -> int:
    number = _number(value)
    if not isinstance(number, int) or not 0 <= number < 1 << 63:
        raise ValueError(
            f"stream={value!r}{where}: must be one integer in [0, 2**63). Delete it to have it chosen anew."
        )
    return number


def _number(value: Any) -> int | float | None:
    """The value as a Python number; None if it is none."""
    if isinstance(value, (Tensor, np.generic, np.ndarray)):
        if (value.numel() if isinstance(value, Tensor) else value.size) != 1:
            return None
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _check_complete(entry: StateDict, key: Any, specs: Sequence[State], missing: Sequence[State]) -> None:
    """A moment that begins at zero in the middle of a run, or without a count of its steps, is not what was saved."""
    steps = float(entry.get("step", 0))
    names = [spec.name for spec in missing if not spec.restarts]
    if names and steps > 0:
        raise ValueError(
            f"Parameter {key} of the checkpoint has made {steps:.0f} steps and has no {' or '.join(names)}. "
            "subulp.convert() takes over what fits and begins the rest anew."
        )
    if "step" not in entry and any(spec.squared for spec in specs) and len(missing) < len(specs):
        raise ValueError(
            f"Parameter {key} of the checkpoint has states and no step: its bias correction would begin anew. Add the number "
            "of its updates as 'step', or begin its states anew with subulp.convert()."
        )


_SIGNS = (
    ("torch.optim.Adafactor", {"beta2_decay"}),
    ("transformers' or subulp's Adafactor", {"relative_step", "warmup_init"}),
    ("Muon", {"ns_steps"}),
    ("Prodigy", {"d_coef"}),
    ("SGD", {"dampening", "nesterov"}),
    ("Adam or AdamW", {"betas", "eps", "amsgrad"}),
    ("CAME", {"betas", "clip_threshold"}),
    ("Lion", {"betas"}),
)
"""Whose groups have these keys, the more special first."""


def _origin(optimizer: Any, state_dict: StateDict) -> str:
    """From which other optimizer a state dict seems to be, as a sentence; empty if it could be this one's."""
    keys = set().union(*(group for group in state_dict["param_groups"] if isinstance(group, Mapping)))
    name, own = (next((name for name, signs in _SIGNS if signs <= set(k)), None) for k in (keys, optimizer.defaults))
    if name is None or name == own or type(optimizer).__name__ in name:
        return ""
    return (
        f" The checkpoint looks like one of {name}, this optimizer is {type(optimizer).__name__}: load it into the one that "
        "wrote it, or take over what fits with subulp.convert()."
    )
