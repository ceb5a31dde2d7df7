"""Updates inside the backward pass, so that the gradients of a model never exist all at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subulp.optimizer import Optimizer
from subulp.options import check_positive, one_of, optional


class FusedBackward:
    """Steps each parameter as soon as its gradient is complete, and frees the gradient.

    ::

        fused = subulp.FusedBackward(optimizer)
        for batch in data:
            model(batch).backward()      # updates the weights; optimizer.step() would find no gradients

    The bits are those of ``backward()`` followed by ``optimizer.step()``: the noise does not depend on the order of
    parameters. Parameters may be moved or re-pointed between calls (layer offload). Learning-rate schedulers work as
    usual. Without a scaler only: ``torch.amp.GradScaler`` needs all gradients before any update.

    Args:
        optimizer: a subulp optimizer; its groups must be complete.
        max_grad_norm: clip gradients to this norm (> 0), or None.
        clip: what the norm is of. "tensor": of each parameter's gradient alone; equal to calling
            ``torch.nn.utils.clip_grad_norm_`` for each parameter. "recent": of all gradients, each as last seen. A
            parameter whose turn has not come in this backward pass counts with its norm of the pass before, and in the
            first pass not at all; otherwise the same as global clipping.

    Raises:
        TypeError: ``optimizer`` has no ``step_parameter``.
        ValueError: ``max_grad_norm`` or ``clip`` is out of range.
    """

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None = None, clip: str = "tensor") -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"FusedBackward got a {type(optimizer).__module__}.{type(optimizer).__name__}: it updates single parameters, "
                "which subulp's optimizers can. Pass one of these."
            )
        self._max_norm = optional(check_positive)("max_grad_norm", max_grad_norm)
        self._clip = one_of("tensor", "recent")("clip", clip)
        # Weak, as in the hooks: a parameter whose hook held the optimizer, and so the parameter, would live for ever.
        self._optimizer = weakref.ref(optimizer)
        # Strong, so that nobody has to keep this object for its hooks to work.
        optimizer.__dict__.setdefault("_fused_backward", []).append(self)
        self._squares: dict[int, Tensor] = {}
        self._waiting = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook_of(number))
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]

    def remove(self) -> None:
        """Detaches the hooks; gradients stay in ``p.grad`` from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        optimizer = self._optimizer()
        if optimizer is not None and self in (kept := optimizer.__dict__.get("_fused_backward", [])):
            kept.remove(self)

    def __enter__(self) -> FusedBackward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside only add to ``p.grad``: for all but the last micro-batch of an accumulated step."""
        before, self._waiting = self._waiting, True
        try:
            yield
        finally:
            self._waiting = before

    def _hook_of(self, number: int) -> Callable[[Tensor], None]:
        this = weakref.ref(self)

        def hook(p: Tensor) -> None:
            fused = this()
            if fused is not None and not fused._waiting:
                fused._step(p, number)

        return hook

    def _step(self, p: Tensor, number: int) -> None:
        optimizer = self._optimizer()
        if optimizer is None or p.grad is None:
            return
        if self._max_norm is not None:
            self._clip_gradient(p, self._max_norm)
        # By number: load_state_dict replaces the group dicts.
        optimizer.step_parameter(p, optimizer.param_groups[number])
        p.grad = None

    def _clip_gradient(self, p: Tensor, max_norm: float) -> None:
        if self._clip == "tensor":
            torch.nn.utils.clip_grad_norm_([p], max_norm)
            return
        norm: Any = torch.nn.utils.get_total_norm([p.grad])  # type: ignore[list-item]
        # Hooks run in several threads; both lines are atomic, and no lock can be left held by a fork.
        self._squares[id(p)] = norm.double().square()
        squares = list(self._squares.values())
        total = torch.stack([s.to(norm.device) for s in squares]).sum().sqrt().float()
        torch.nn.utils.clip_grads_with_norm_([p], max_norm, total)
