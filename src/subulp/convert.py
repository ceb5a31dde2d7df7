"""Checkpoints of other optimizers, brought to the form that ours load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subulp.optimizer import Optimizer
from subulp.rules.rule import State

BLOCK = 2048
"""Elements that share a scale in the 8-bit formats of CAME8bit and adv_optm."""

_GROUP_KEYS = frozenset(("params", "param_names", "name", "initial_lr", "optim_type"))


class Converted(NamedTuple):
    """What :func:`convert` returns."""

    state_dict: dict[str, Any]
    """For ``optimizer.load_state_dict``."""
    notes: list[str]
    """What was lost, is not exact, or was not taken over; empty if nothing."""


def convert(state_dict: Mapping[str, Any], optimizer: Optimizer) -> Converted:
    """A checkpoint of another optimizer (or of OneTrainer's backups) in the form that ``optimizer`` loads.

    Plain checkpoints of ``torch.optim`` Adam, AdamW, SGD, Muon, of transformers' Adafactor and of CAME load as they are;
    through here they also come with notes. Beyond these:

    * CAME8bit: states that are lists of blocks ``{"value": uint8, "scale": s, "min": m}`` become ``value * s + m``;
    * adv_optm ``int8_sr``: ``exp_avg`` (int8) and ``exp_avg_sq`` (uint8) with scales in ``exp_avg_scale``,
      ``exp_avg_sq_scale`` become ``value * scale``, both for each 2048 elements;
    * adv_optm ``factored``: dropped, since its moments are not those of one parameter; the states begin anew.

    Hyper-parameters that ``optimizer`` has and accepts are taken over, others are not. ``state_dict`` is left as it is.

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
    groups = [
        _group(group, mine, optimizer, number, notes)
        for number, (group, mine) in enumerate(zip(saved, own, strict=True))
    ]
    state: dict[Any, Any] = {}
    for group, mine in zip(saved, own, strict=True):
        for key, p in zip(group["params"], mine["params"], strict=True):
            if key in state_dict["state"]:
                specs = optimizer.states(mine, p)
                state[key] = _entry(state_dict["state"][key], p, specs, f"parameter {key}", notes)
    return Converted({"state": state, "param_groups": groups}, notes)


def _group(
    saved: Mapping[str, Any], own: dict[str, Any], optimizer: Optimizer, number: int, notes: list[str]
) -> dict[str, Any]:
    group = {key: saved[key] for key in _GROUP_KEYS if key in saved}
    for key, value in saved.items():
        if key not in optimizer.defaults or key == "params":
            continue
        try:
            optimizer._check({**{k: v for k, v in own.items() if k != "params"}, key: value}, "")
        except (TypeError, ValueError, NotImplementedError) as error:
            notes.append(f"group {number}: {key} stays {own[key]!r}: {error}")
        else:
            group[key] = value
    return group


def _entry(saved: Mapping[str, Any], p: Tensor, specs: Sequence[State], where: str, notes: list[str]) -> dict[str, Any]:
    entry = {key: saved[key] for key in ("step", "stream", "RMS") if key in saved and saved[key] is not None}
    if saved.get("factored"):
        notes.append(f"{where}: its moments are factored over reshaped matrices and are dropped; they begin anew.")
        return {}
    for spec in specs:
        value = spec.found_in(saved, p.shape)
        shape = spec.shape(p.shape)
        if value is None:
            if entry.get("step") and spec.squared:
                notes.append(f"{where}: {spec.name} is not in the checkpoint: all its states begin anew.")
                return {}
            if entry.get("step"):
                notes.append(f"{where}: {spec.name} is not in the checkpoint and begins at zero.")
            continue
        if isinstance(value, (list, tuple)):
            value = torch.cat([_from_range(block) for block in value])
            notes.append(
                f"{where}: {spec.name} was in 8 bits; its error is up to 1/510 of the range of each block of {BLOCK}."
            )
        elif value.dtype in (torch.int8, torch.uint8):
            scales = saved.get(f"{spec.name}_scale", saved.get(f"{spec.alias}_scale"))
            value = _from_scales(value, scales, f"{where}: {spec.name}")
            notes.append(f"{where}: {spec.name} was in 8 bits; its error is up to the scale of each block of {BLOCK}.")
        elif spec.squared and value.dtype in (torch.bfloat16, torch.float16) and "stream" not in saved:
            notes.append(f"{where}: {spec.name} was rounded to nearest and may be too large. It falls from now on.")
        if value.numel() != prod(shape):
            raise ValueError(
                f"{where}: {spec.name} has {value.numel()} elements, its parameter needs the shape {shape}."
            )
        entry[spec.name] = value.reshape(shape)
    return entry


def _from_range(block: Mapping[str, Any]) -> Tensor:
    value: Tensor = block["value"]
    # A block of equal elements has scale 0 (or NaN, from 0 / 0), and its minimum is what they are.
    scale = torch.nan_to_num(torch.as_tensor(block["scale"], dtype=torch.float32))
    return value.reshape(-1).float() * scale + torch.as_tensor(block["min"], dtype=torch.float32)


def _from_scales(value: Tensor, scales: Tensor | None, where: str) -> Tensor:
    blocks = -(-value.numel() // BLOCK)
    if scales is None or scales.numel() != blocks:
        found = "none" if scales is None else f"{scales.numel()}"
        raise ValueError(f"{where} has {blocks} blocks of 8-bit numbers and {found} scales: the checkpoint is damaged.")
    spread = scales.float().repeat_interleave(BLOCK)[: value.numel()].to(value.device)
    return (value.reshape(-1).float() * spread).view(value.shape)
