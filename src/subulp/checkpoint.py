"""Loading state without losing a bit.

``torch.optim.Optimizer.load_state_dict`` casts every state tensor but "step" to the parameter's dtype: fp32 states under
bf16 parameters lose 16 bits, integers are rounded. It hands through what it does not know, so the tensors travel in boxes
which are opened afterwards under our own policy: each state gets the dtype in which the optimizer stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from subulp.checks import check_state
from subulp.rules.rule import State
from subulp.sharding import like_state

StateDict = dict[str, Any]


class _Box:
    """A tensor that torch's cast does not see."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def pack(optimizer: Any, state_dict: StateDict) -> StateDict:
    """The state dict with boxed tensors, and with the options that its groups lack taken from the optimizer's own.

    Raises ValueError if a hyper-parameter or the shape of a state is wrong; the optimizer is untouched then.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"The state dict has no {key!r}: pass what optimizer.state_dict() returned.")
    groups = [dict(group) for group in state_dict["param_groups"]]
    for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        for key, value in own.items():
            if key in optimizer.defaults:
                group.setdefault(key, value)
        optimizer._check(
            {k: v for k, v in group.items() if k != "params"}, f" (param group {number} of the checkpoint)"
        )
    pairs = dict(_pairs(groups, optimizer.param_groups))
    state: dict[Any, Any] = {}
    for key, entry in state_dict["state"].items():
        if key in pairs and isinstance(entry, dict):
            p, group = pairs[key]
            entry = {k: v for k, v in entry.items() if v is not None}  # torch's SGD keeps a None without momentum
            specs = optimizer.states(group, p)
            found = {s: like_state(v, p, s) for s in specs if (v := s.found_in(entry, p.shape)) is not None}
            check_state(p, found, f", parameter {key} of the checkpoint")
            _check_step(entry, key)
            _check_complete(entry, key, [spec for spec in specs if spec not in found])
            entry = {k: v for k, v in entry.items() if k not in {s.alias for s in found}}
            entry.update((spec.name, value) for spec, value in found.items())
            entry = {k: _Box(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        state[key] = entry
    return {**state_dict, "state": state, "param_groups": groups}


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
            counter_device = p.device if group["capturable"] else torch.device("cpu")
            for name, value in list(entry.items()):
                if name == "step":
                    value = value.tensor if isinstance(value, _Box) else value
                    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 0:
                        value = torch.tensor(float(value), dtype=torch.float32)
                    # A copy: the caller's state dict must not count along.
                    entry[name] = value.to(counter_device, copy=True)
                elif isinstance(value, _Box):
                    dtype = storage_dtype(p, specs[name], group) if name in specs else value.tensor.dtype
                    entry[name] = value.tensor.to(device=p.device, dtype=dtype, copy=True)
                elif name == "stream":
                    entry[name] = int(value)


def _pairs(
    saved: list[dict[str, Any]], own: list[dict[str, Any]]
) -> Iterator[tuple[Any, tuple[Tensor, dict[str, Any]]]]:
    """(key in the checkpoint, (parameter, checkpoint group)), by position, as torch maps them."""
    for group, own_group in zip(saved, own, strict=False):
        for key, p in zip(group["params"], own_group["params"], strict=False):
            yield key, (p, group)


def _check_step(entry: dict[str, Any], key: Any) -> None:
    step = entry.get("step", 0)
    number = float(step) if not isinstance(step, Tensor) or step.numel() == 1 else -1.0
    if not 0 <= number < 1 << 32:
        raise ValueError(f"step={step!r} of parameter {key} of the checkpoint: must be one number in [0, 2**32).")


def _check_complete(entry: StateDict, key: Any, missing: Sequence[State]) -> None:
    """A second moment that begins at zero in the middle of a run would make the first updates several times too large."""
    names = [spec.name for spec in missing if spec.squared]
    if names and float(entry.get("step", 0)) > 0:
        raise ValueError(
            f"Parameter {key} of the checkpoint has made {float(entry['step']):.0f} steps and has no {' or '.join(names)}: "
            "another optimizer has saved it. subulp.convert() takes over what fits and begins the rest anew."
        )
