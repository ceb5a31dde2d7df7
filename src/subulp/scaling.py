"""Loss scaling (AMP): what ``torch.amp.GradScaler`` tells an optimizer, and what a step makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class LossScaling:
    """The part of an optimizer that gradient scalers know."""

    @property
    def amp_scaling(self) -> bool:
        """Whether ``torch.amp.GradScaler`` leaves unscaling and skipping to the step (default False).

        Then ``scaler.step(opt)`` sets ``opt.grad_scale`` and ``opt.found_inf`` and always calls the step, which divides the
        gradients by the scale in fp32 and changes nothing, counters and noise included, if one is not finite. With
        ``capturable=True`` on a GPU the host does not wait for either. Off by default because Lightning refuses gradient
        clipping for such optimizers.
        """
        return bool(getattr(self, "_step_supports_amp_scaling", False))

    @amp_scaling.setter
    def amp_scaling(self, value: bool) -> None:
        self._step_supports_amp_scaling = value

    def _from_scaler(self, name: str) -> Tensor | None:
        """``grad_scale`` or ``found_inf``: attributes that the scaler sets before a step and deletes after it."""
        return getattr(self, name, None)

    def _overflowed(self) -> bool:
        found_inf = self._from_scaler("found_inf")
        return found_inf is not None and bool(found_inf)

    def _read_factor(self, group: dict[str, Any]) -> float:
        scale = self._from_scaler("grad_scale")
        return sign_of(group) * (1.0 if scale is None else float(1 / np.float32(scale.item())))

    def _amp_tensors(self, device: torch.device) -> dict[str, Tensor]:
        given = {name: self._from_scaler(name) for name in ("grad_scale", "found_inf")}
        return {name: t.to(device, torch.float32, non_blocking=True) for name, t in given.items() if t is not None}


def sign_of(group: dict[str, Any]) -> float:
    """What gradients are multiplied by, by ``maximize``."""
    return -1.0 if group["maximize"] else 1.0
