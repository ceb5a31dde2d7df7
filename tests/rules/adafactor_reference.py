"""Adafactor from its paper (arXiv 1804.04235) with the choices of transformers and of torch, one whole tensor at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdafactorReference(torch.optim.Optimizer):
    """Computes in the parameter's own precision; ``eps[0]=None`` stands for fp32's machine epsilon, as under fp32 weights."""

    def __init__(self, params: Any, lr: float | None = None, **options: Any) -> None:
        defaults = {
            "eps": (1e-30, 1e-3),
            "clip_threshold": 1.0,
            "decay_rate": -0.8,
            "beta1": None,
            "weight_decay": 0.0,
            "scale_parameter": True,
            "relative_step": True,
            "warmup_init": False,
            "semantics": "transformers",
        }
        super().__init__(params, {**defaults, "lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if group["semantics"] == "torch":
                    self.torchs(p, p.grad, state, group)
                else:
                    self.transformers(p, p.grad, state, group)

    def transformers(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        t = state["step"]
        rho = group["lr"]
        if group["relative_step"]:
            rho = min(1e-6 * t if group["warmup_init"] else 1e-2, t**-0.5)
        alpha = rho * max(group["eps"][1], rms(p)) if group["scale_parameter"] else rho
        row, col, v = self.moments(state, g.square() + group["eps"][0], 1 - t ** group["decay_rate"])
        if row is not None:
            v = row * col / row.mean(-2, keepdim=True)
        self.apply(p, g / v.sqrt(), alpha, alpha * group["weight_decay"], state, group)

    def torchs(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        t = state["step"]
        floor = 2.0**-23 if group["eps"][0] is None else group["eps"][0]
        alpha = max(group["eps"][1], rms(p)) * min(group["lr"], t**-0.5)
        row, col, v = self.moments(state, g.square(), 1 - t ** group["decay_rate"])
        if row is not None:
            v = row * col / row.mean(-2, keepdim=True).clamp(min=floor)
        self.apply(p, g / v.clamp(min=floor**2).sqrt(), alpha, group["lr"] * group["weight_decay"], state, group)

    @staticmethod
    def moments(state: dict[str, Any], squares: Tensor, beta2: float) -> tuple[Any, Any, Any]:
        means = [squares] if squares.dim() < 2 else [squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)]
        old = state.get("second", [torch.zeros_like(mean) for mean in means])
        state["second"] = [beta2 * a + (1 - beta2) * b for a, b in zip(old, means, strict=True)]
        return (None, None, state["second"][0]) if squares.dim() < 2 else (*state["second"], None)

    @staticmethod
    def apply(p: Tensor, u: Tensor, alpha: float, decay: float, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = alpha * u / max(1.0, rms(u) / group["clip_threshold"])
        if group["beta1"] is not None:
            old = state.get("exp_avg", torch.zeros_like(p))
            update = state["exp_avg"] = group["beta1"] * old + (1 - group["beta1"]) * update
        p.copy_(p - decay * p - update)


def rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt())
