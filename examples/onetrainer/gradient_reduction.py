"""OneTrainer's ``bf16_stochastic_rounding`` for its gradient reduction, with noise that follows parameter and step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import subulp
from subulp.numerics import streams


class GradientRounding:
    """Rounds reduced gradients with the calls that OneTrainer's trainer and ``multi_gpu_util`` make.

    ::

        rounding = GradientRounding(parameters, seed=0)     # once, where the optimizer is made
        rounding.set_seed(train_progress.global_step, train_device)
        rounding.copy_stochastic_(param.grad, reduced)

    The noise of an element is a function of the seed, the parameter, the step and the element: equal on all ranks, whatever
    the order in which gradients arrive there; the same after a resume at the same ``global_step``; torch's generators are
    not used. It is not correlated with the noise of an optimizer of the same seed.

    Args:
        parameters: tensors or ``(name, tensor)`` pairs, the same on all ranks. Without names the position counts.
        seed: 0 <= seed < 2**64; equal on all ranks.
    """

    def __init__(self, parameters: Iterable[Any], seed: int = 0) -> None:
        items = streams.named(parameters)
        self._parameters = [p for _, p in items]
        self._streams = streams.helper_streams("reduced gradient", [name for name, _ in items], 0)
        self._seed = seed
        self._step = 0
        self._last = 0

    def set_seed(self, seed: int, device: torch.device | None = None) -> None:
        """Begins the step of this number (``global_step``). ``device`` is accepted and not needed."""
        self._step = seed

    def copy_stochastic_(self, target: Tensor, source: Tensor) -> None:
        """``target.copy_(source)``, rounded stochastically; ``target`` is the gradient of one of the parameters.

        Raises:
            ValueError: it is not.
        """
        stream = self._streams[self._position(target)]
        subulp.copy_stochastic_(target, source, seed=self._seed, stream=stream, step=self._step)

    def _position(self, grad: Tensor) -> int:
        """Of the parameter with this gradient, sought from the last one outwards: they come in order, or in reverse."""
        count = len(self._parameters)
        for distance in range(count // 2 + 1 if count else 0):
            for position in ((self._last + distance) % count, (self._last - distance) % count):
                if self._parameters[position].grad is grad:
                    self._last = position
                    return position
        raise ValueError(
            f"A target of shape {tuple(grad.shape)} is the gradient of none of the {count} parameters: pass all that are "
            "trained to GradientRounding, and param.grad itself as the target."
        )
