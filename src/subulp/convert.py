"""Checkpoints of other optimizers, brought to the form that ours load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subulp.foreign_states import entry_of
from subulp.optimizer import Optimizer

_GROUP_KEYS = frozenset(("params", "param_names", "name", "initial_lr", "optim_type"))


class Converted(NamedTuple):
    """What :func:`convert` returns."""

    state_dict: dict[str, Any]
    """For ``optimizer.load_state_dict``."""
    notes: list[str]
    """What was lost, is not exact, or was not taken over; empty if nothing."""

    def summary(self, examples: int = 3) -> str:
        """The notes in one line: each kind once, with how many it concerns and the first of these; "" without notes."""
        kinds: dict[str, list[str]] = {}
        for note in self.notes:
            where, _, what = note.partition(": ")
            kinds.setdefault(what, []).append(where)
        lines = []
        for what, places in kinds.items():
            more = ", ..." if len(places) > examples else ""
            lines.append(f"{what.rstrip('.')} ({len(places)}: {', '.join(places[:examples])}{more})")
        return "; ".join(lines)


def convert(state_dict: Mapping[str, Any], optimizer: Optimizer, *, own_settings: bool = False) -> Converted:
    """A checkpoint of another optimizer (or of OneTrainer's backups) in the form that ``optimizer`` loads.

    Plain checkpoints of ``torch.optim`` Adam, AdamW, SGD, Muon, of transformers' Adafactor and of CAME load as they are;
    through here they also come with notes. Beyond these:

    * CAME8bit: states that are lists of blocks ``{"value": uint8, "scale": s, "min": m}`` become ``value * s + m``; the
      factors of 1x1 convolutions become those of the last two dimensions, and so do the second moments of other weights
      with more than two dimensions, which it keeps whole;
    * prodigyopt and adv_optm's Prodigy: ``p0`` of a parameter that began at zero, which is one zero there, becomes a tensor
      of zeros; ``d`` and the other numbers of the estimate continue;
    * adv_optm ``int8_sr``: ``exp_avg`` (int8) and ``exp_avg_sq`` (uint8) with scales in ``exp_avg_scale``,
      ``exp_avg_sq_scale`` become ``value * scale``, both for each 2048 elements;
    * adv_optm ``factored``: dropped, since its moments are not those of one parameter; the states begin anew.

    Hyper-parameters that ``optimizer`` has and accepts are taken over, others are not; with ``own_settings`` it keeps its
    own. What an optimizer writes into its groups itself (``Optimizer.run_state``) is of the checkpoint in either case.
    ``state_dict`` is left as it is.

    Raises:
        ValueError: the checkpoint belongs to another model: the number of groups or parameters, or a shape, differs.
    """
    notes: list[str] = []
    saved, own = state_dict["param_groups"], optimizer.param_groups
    counts = [len(group["params"]) for group in saved], [len(group["params"]) for group in own]
    if counts[0] != counts[1]:
        raise ValueError(
            f"The checkpoint has groups of {counts[0]} parameters, the optimizer of {counts[1]}: make the optimizer with the "
            "parameters that the checkpoint was written for, in the same groups."
        )
    groups: list[dict[str, Any]] = []
    state: dict[Any, Any] = {}
    for number, (group, mine) in enumerate(zip(saved, own, strict=True)):
        settings = {key: value for key, value in mine.items() if key in optimizer.defaults}
        taken = {} if own_settings else _accepted(group, settings, optimizer, number, notes)
        kept = {key: group[key] for key in _GROUP_KEYS if key in group}
        run = {key: _like(group[key], mine[key]) for key in optimizer.run_state if key in group}
        groups.append({**(settings if own_settings else taken), **kept, **run})
        # Which states a parameter has can depend on the settings: those that it is going to have.
        settings |= taken
        for key, p in zip(group["params"], mine["params"], strict=True):
            if key in state_dict["state"]:
                saved_entry = state_dict["state"][key]
                specs = optimizer.states(settings, p)
                state[key] = entry_of(saved_entry, p, specs, group, settings, f"parameter {key}", notes)
    return Converted({"state": state, "param_groups": groups}, notes)


def _accepted(
    saved: Mapping[str, Any], own: Mapping[str, Any], optimizer: Optimizer, number: int, notes: list[str]
) -> dict[str, Any]:
    """The hyper-parameters of a saved group that the optimizer has and accepts."""
    wanted = {k: v for k, v in saved.items() if k in own and k != "params" and k not in optimizer.run_state}
    errors: dict[str, Exception] = {}
    taken: dict[str, Any] = {}
    # All together first, since one may need another (nesterov momentum); else as many as can be.
    for share in (wanted, *({key: value} for key, value in [*wanted.items()] * 2)):
        if share.keys() <= taken.keys():
            continue
        try:
            optimizer._check({**own, **taken, **share}, "")
        except (TypeError, ValueError, NotImplementedError) as error:
            errors.update(dict.fromkeys(share, error))
        else:
            taken |= share
    for key, reason in errors.items():
        if key not in taken:
            notes.append(f"group {number}: {key} stays {own[key]!r}: {reason}")
    return taken


def _like(value: Any, own: Any) -> Any:
    """A number in the form in which the optimizer keeps it: other packages have floats where ours has tensors."""
    return torch.as_tensor(value, dtype=own.dtype).reshape(own.shape) if isinstance(own, Tensor) else value
