"""An exponential moving average of the weights, in bf16 or fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from subulp.backends import registry
from subulp.backends.bucket import make_buckets
from subulp.checks import is_plain
from subulp.numerics import streams
from subulp.options import check_counter, check_fraction
from subulp.rounding import LERP

Named = Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class EMA:
    r"""A moving average of parameters: ``ema + (1 - decay) * (p - ema)`` in fp32, stored with one stochastic rounding.

    In bf16 with rounding to nearest an average with decay 0.9999 never moves: the change is a hundredth of an ulp. The
    decay at optimization step ``t`` (from 0) is ``min((1 + t) / (10 + t), decay)``, and only every
    ``update_step_interval``-th step updates, as in OneTrainer's ``EMAModuleWrapper``, whose six methods these are.

    The bits depend on the seed, the names (or positions) and ``t`` alone: they are equal on every replica and device.

    Args:
        parameters: what is averaged: a module, tensors or ``(name, tensor)`` pairs. Those that need no gradient are kept as
            they are.
        decay: in [0, 1).
        update_step_interval: update when ``(t + 1)`` is divisible by it.
        device: where the averages live; None: with each parameter.
        dtype: of the averages; None: each parameter's.
        seed: of the rounding noise. It is not correlated with an optimizer's of the same seed.
        temp_device: where :meth:`copy_ema_to` puts the weights aside; None: with each parameter. "cpu" saves GPU memory.
        stream: where the noise streams of tensors without names begin; None: apart from those of every other average that
            this process has made. Kept by :meth:`state_dict`.

    Raises:
        ValueError, TypeError: an argument out of range, or parameters that do not fit the averages.
    """

    def __init__(
        self,
        parameters: Named,
        decay: float = 0.9999,
        update_step_interval: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        temp_device: torch.device | str | None = None,
        stream: int | None = None,
    ) -> None:
        self.decay = float(check_fraction("decay", decay))
        if check_counter("update_step_interval", update_step_interval, 32) < 1:
            raise ValueError(f"update_step_interval={update_step_interval!r}: must be at least 1.")
        self.update_step_interval = update_step_interval
        self._seed = check_counter("seed", seed, 64)
        items = streams.named(parameters)
        self._names = [name for name, _ in items]
        self._base = streams.helper_base("ema", self._names, stream)
        self._streams = streams.helper_streams("ema", self._names, self._base)
        self._temp_device = temp_device
        self.ema_parameters = [p.detach().to(device=device, dtype=dtype, copy=True) for _, p in items]
        self._temp: list[Tensor] | None = None

    def get_current_decay(self, optimization_step: int) -> float:
        """The decay at this step."""
        return min((1 + optimization_step) / (10 + optimization_step), self.decay)

    @torch.no_grad()
    def step(self, parameters: Named, optimization_step: int) -> None:
        """Updates the averages after optimization step ``optimization_step`` (0, 1, 2, ...)."""
        step = check_counter("optimization_step", optimization_step, 32)
        tensors = self._fitting(parameters)
        if (step + 1) % self.update_step_interval != 0:
            return
        chosen = [i for i, p in enumerate(tensors) if p.requires_grad]
        averages = [self.ema_parameters[i] for i in chosen]
        ends = [tensors[i].detach().to(e.device, non_blocking=True) for i, e in zip(chosen, averages, strict=True)]
        simple = [is_plain(e, [p]) for e, p in zip(averages, ends, strict=True)]
        weight = np.array([[1.0 - self.get_current_decay(step)]])
        rows = np.zeros(len(chosen), dtype=np.int64)
        steps = np.full(len(chosen), step, dtype=np.int64)
        for bucket in make_buckets([averages], [ends], simple, [self._streams[i] for i in chosen]):
            bucket.fill(steps, weight, rows)
            registry.choose("auto", bucket.device, bucket.dtypes).run(LERP, bucket, seed=self._seed, stochastic=True)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Moves the averages."""
        self.ema_parameters = [
            e.to(device=device, dtype=dtype if e.is_floating_point() else e.dtype) for e in self.ema_parameters
        ]

    @torch.no_grad()
    def copy_ema_to(self, parameters: Named, store_temp: bool = True) -> None:
        """Overwrites the parameters with their averages; keeps their values for :meth:`copy_temp_to` if asked."""
        tensors = self._fitting(parameters)
        if store_temp:
            self._temp = [p.detach().to(device=self._temp_device, copy=True) for p in tensors]
        for p, e in zip(tensors, self.ema_parameters, strict=True):
            p.copy_(e)

    @torch.no_grad()
    def copy_temp_to(self, parameters: Named) -> None:
        """Brings back the values that :meth:`copy_ema_to` kept."""
        if self._temp is None:
            raise RuntimeError("There are no kept values: call copy_ema_to(parameters, store_temp=True) first.")
        for p, kept in zip(self._fitting(parameters), self._temp, strict=True):
            p.copy_(kept)
        self._temp = None

    def state_dict(self) -> dict[str, Any]:
        """``decay``, ``stream`` and the live ``ema_parameters``; loads with ``torch.load(weights_only=True)``."""
        return {"decay": self.decay, "ema_parameters": self.ema_parameters, "stream": self._base}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the averages that :meth:`state_dict` (or OneTrainer's) gave.

        Dtypes, devices, seed and ``decay`` stay those of this object: a decay that was changed for a resumed run holds.
        """
        saved: Sequence[Tensor] = state_dict["ema_parameters"]
        self._check_fit(saved)
        self._base = check_counter("stream", state_dict.get("stream", self._base), streams.BITS)
        self._streams = streams.helper_streams("ema", self._names, self._base)
        for own, value in zip(self.ema_parameters, saved, strict=True):
            own.copy_(value)

    def _fitting(self, parameters: Named) -> list[Tensor]:
        tensors = [p for _, p in streams.named(parameters)]
        self._check_fit(tensors)
        return tensors

    def _check_fit(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.ema_parameters):
            raise ValueError(
                f"{len(tensors)} parameters for {len(self.ema_parameters)} averages: pass those it was made of."
            )
        for i, (t, e) in enumerate(zip(tensors, self.ema_parameters, strict=True)):
            if t.shape != e.shape:
                raise ValueError(
                    f"Parameter {i} has shape {tuple(t.shape)}, its average {tuple(e.shape)}: pass those it was made of."
                )
