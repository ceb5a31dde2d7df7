"""Gradient accumulation in bf16 that loses no small gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from subulp.numerics import streams
from subulp.options import check_counter
from subulp.rounding import add_stochastic_


class GradientAccumulation:
    """Adds the gradients of several backward passes with stochastic rounding.

    autograd adds a bf16 gradient to ``p.grad`` in bf16, to nearest: once the sum is 256 times as large as a summand, the
    summand is lost. With this attached each pass starts from an empty ``p.grad``, and what it gives is added to a buffer in
    fp32 and rounded stochastically, once. After the last of ``steps`` passes ``p.grad`` holds the sum.

    ::

        accumulation = subulp.GradientAccumulation(model.named_parameters(), steps=4)
        for batch in data:
            (model(batch) / 4).backward()
            if last_of_four:
                optimizer.step()
                optimizer.zero_grad()

    A parameter that has no part in some passes has its sum still in the buffer at the end: call :meth:`flush` before the
    step if that can be. Attach :class:`subulp.FusedBackward` after this, and it updates each parameter in the last pass.

    Args:
        parameters: a module, tensors or ``(name, tensor)`` pairs.
        steps: backward passes a step, >= 1.
        seed: of the rounding noise. It is not correlated with an optimizer's of the same seed.
        stream: where the noise streams of tensors without names begin; None: apart from those of every other accumulation
            that this process has made. Kept by :meth:`state_dict`.

    Raises:
        ValueError, TypeError: ``steps`` or ``seed`` is out of range.
    """

    def __init__(
        self,
        parameters: Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        steps: int,
        seed: int = 0,
        stream: int | None = None,
    ) -> None:
        if check_counter("steps", steps, 31) < 1:
            raise ValueError(f"steps={steps!r}: must be at least 1.")
        self._steps = steps
        self._seed = check_counter("seed", seed, 64)
        self._entries: list[_Entry] = []
        self._hooks = []
        items: list[tuple[str | None, Any]] = [*streams.named(parameters)]
        names = [name for name, _ in items]
        base = streams.helper_base("gradient", names, stream)
        for (_, p), own in zip(items, streams.helper_streams("gradient", names, base), strict=True):
            if p.requires_grad:
                entry = _Entry(weakref.ref(p), own)
                self._entries.append(entry)
                self._hooks.append(p.register_post_accumulate_grad_hook(partial(self._add, entry)))

    def _add(self, entry: _Entry, p: Tensor) -> None:
        with torch.no_grad():
            entry.passes += 1
            if entry.buffer is not None and p.grad is not None:
                add_stochastic_(entry.buffer, p.grad, seed=self._seed, stream=entry.stream, step=entry.additions)
                entry.additions = (entry.additions + 1) % (1 << 32)
                p.grad = entry.buffer
            if entry.passes < self._steps:
                entry.buffer, p.grad = p.grad, None
            else:
                entry.buffer, entry.passes = None, 0

    def flush(self) -> None:
        """Ends the step for parameters that were in fewer passes: their sums go to ``p.grad``."""
        for entry in self._entries:
            p = entry.parameter()
            if p is not None and entry.buffer is not None:
                p.grad = entry.buffer
            entry.buffer, entry.passes = None, 0

    def remove(self) -> None:
        """Detaches the hooks; sums so far go to ``p.grad``."""
        self.flush()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """The counters of the noise. Save between steps: sums are not included."""
        return {
            "additions": [entry.additions for entry in self._entries],
            "streams": [entry.stream for entry in self._entries],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with the noise of another run."""
        counts = state_dict["additions"]
        if len(counts) != len(self._entries):
            raise ValueError(
                f"{len(counts)} counters for {len(self._entries)} parameters: load what the same model gave."
            )
        kept = state_dict.get("streams", [entry.stream for entry in self._entries])
        for entry, count, stream in zip(self._entries, counts, kept, strict=True):
            entry.additions = check_counter("additions", count, 32)
            entry.stream = check_counter("stream", stream, streams.BITS)


class _Entry:
    __slots__ = ("additions", "buffer", "parameter", "passes", "stream")

    def __init__(self, parameter: Callable[[], Tensor | None], stream: int) -> None:
        self.parameter = parameter
        self.stream = stream
        self.buffer: Tensor | None = None
        self.passes = 0
        self.additions = 0
