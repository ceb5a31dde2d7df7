"""One parameter's states in the checkpoint of another optimizer, as ours keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from subulp.formula.rule import State
from subulp.storage import ROUNDED

BLOCK = 2048
"""Elements that share a scale in the 8-bit format of adv_optm."""


def entry_of(
    saved: Mapping[str, Any],
    p: Tensor,
    specs: Sequence[State],
    saved_group: Mapping[str, Any],
    group: Mapping[str, Any],
    where: str,
    notes: list[str],
) -> dict[str, Any]:
    """The states ``specs`` of ``p`` from its entry in a checkpoint, see :func:`subulp.convert`; ``group``: its settings here.

    What is lost goes to ``notes``. ValueError for a state that cannot be this parameter's.
    """
    entry = {key: saved[key] for key in ("step", "stream", "RMS") if key in saved and saved[key] is not None}
    if saved.get("factored"):
        notes.append(f"{where}: its moments are factored over reshaped matrices and are dropped; they begin anew.")
        return {}
    started = float(entry.get("step", 0)) > 0
    if any(spec.name == "exp_avg_res_row" for spec in specs) and "RMS" in saved:
        saved = _factors_of_came(saved, p, group, where, notes)
    for spec in specs:
        value = spec.found_in(saved, p.shape)
        shape = spec.shape(p.shape)
        if value is None:
            if started and spec.squared:
                notes.append(f"{where}: {spec.name} is not in the checkpoint: all its states begin anew.")
                return {}
            if started:
                notes.append(f"{where}: {spec.name} is not in the checkpoint and begins at zero.")
            continue
        if isinstance(value, (list, tuple)):
            value = torch.cat([_from_range(block) for block in value])
            notes.append(f"{where}: {spec.name} was in 8 bits; its error is up to 1/510 of the range of each block.")
        elif value.dtype in (torch.int8, torch.uint8):
            scales = saved.get(f"{spec.name}_scale", saved.get(f"{spec.alias}_scale"))
            value = _from_scales(value, scales, f"{where}: {spec.name}")
            notes.append(f"{where}: {spec.name} was in 8 bits; its error is up to the scale of each block of {BLOCK}.")
        elif spec.squared and value.dtype in ROUNDED and "stream" not in saved:
            notes.append(f"{where}: {spec.name} was rounded to nearest and may be too large. It falls from now on.")
        if spec.own and value.dim() == 0 and len(shape) > 0:
            value = value.expand(shape).clone()  # Prodigy's p0: one zero for a parameter that began at zero
        elif value.numel() != prod(shape):
            sampled = _sampled(value, p, spec, saved_group)
            if sampled is None:
                raise ValueError(
                    f"{where}: {spec.name} has {value.numel()} elements, its parameter needs the shape {shape}."
                )
            if sampled.numel() != prod(shape):
                notes.append(f"{where}: {spec.name} is of a sample of other elements (slice_p) and begins anew.")
                continue
            value = sampled
        entry[spec.name] = value.reshape(shape)
    return entry


def _factors_of_came(
    saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any], where: str, notes: list[str]
) -> dict[str, Any]:
    """CAME8bit's second moments of a weight with more than two dimensions, as means over one of the last two.

    It factors a 1x1 convolution as the matrix of its first two dimensions, ``v = row * col / mean(row)``, and keeps any
    other moment whole: ours are then v, and the means of v, without error. For those others it has no instability.
    """
    saved = dict(saved)
    if p.dim() <= 2:
        return saved
    for name in ("exp_avg_sq", "exp_avg_res"):
        row, col, whole = saved.get(f"{name}_row"), saved.get(f"{name}_col"), saved.get(name)
        if isinstance(row, Tensor) and isinstance(col, Tensor) and row.dim() == 1 and prod(p.shape[2:]) == 1:
            whole = (row.float()[:, None] * col.float() / row.float().mean()).nan_to_num().reshape(p.shape)
        elif row is not None or not isinstance(whole, Tensor) or whole.numel() != p.numel():
            continue
        whole = whole.reshape(p.shape).float()
        saved[f"{name}_row"], saved[f"{name}_col"] = whole.mean(-1), whole.mean(-2)
    if "exp_avg_sq_row" in saved and "exp_avg_res_row" not in saved:
        beta3 = float(group["betas"][2])
        neutral = 1 - beta3 ** float(saved.get("step", 0)) if group.get("bias_correction") else 1.0
        for axis in ("row", "col"):
            saved[f"exp_avg_res_{axis}"] = torch.full_like(saved[f"exp_avg_sq_{axis}"], neutral)
        notes.append(
            f"{where}: CAME8bit does not scale its update by a confidence; exp_avg_res begins at 1, which does not either, "
            "and follows the gradients from now on."
        )
    return saved


def _sampled(value: Tensor, p: Tensor, spec: State, saved_group: Mapping[str, Any]) -> Tensor | None:
    """Prodigy's s or p0 where another slice_p wrote them: the elements that are kept here, if they are there.

    The value itself if they are not; None if it is no sample of this parameter.
    """
    every = int(saved_group.get("slice_p", 1))
    if "slice_p" not in saved_group or value.numel() != -(-p.numel() // every):
        return None
    return value.reshape(-1)[:: spec.every // every] if spec.every % every == 0 else value


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
