"""CAME from its paper (arXiv 2307.02047, algorithm 2) and the choices of its published code, one whole tensor at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CAMEReference(torch.optim.Optimizer):
    """Computes in the parameter's own precision."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **options: Any) -> None:
        defaults = {
            "eps": (1e-30, 1e-16),
            "clip_threshold": 1.0,
            "betas": (0.9, 0.999, 0.9999),
            "bias_correction": False,
        }
        super().__init__(params, {**defaults, "lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2, beta3 = group["betas"]
        state["step"] = state.get("step", 0) + 1
        u = g / self.root(state, "second", g.square() + group["eps"][0], beta2)
        u = u / max(1.0, float(u.square().mean().sqrt()) / group["clip_threshold"])
        m = beta1 * state.get("exp_avg", torch.zeros_like(p)) + (1 - beta1) * u
        state["exp_avg"] = m
        update = m
        if p.dim() >= 2:
            correction = 1 - beta3 ** state["step"] if group["bias_correction"] else 1.0
            instability = (u - m).square() + group["eps"][1]
            update = m / (self.root(state, "residual", instability, beta3) / correction**0.5)
        p.copy_(p - group["lr"] * (group["weight_decay"] * p + update))

    @staticmethod
    def root(state: dict[str, Any], name: str, squares: Tensor, beta: float) -> Tensor:
        """The square root of the (factored) moving average of the squares."""
        if squares.dim() < 2:
            state[name] = beta * state.get(name, torch.zeros_like(squares)) + (1 - beta) * squares
            return state[name].sqrt()
        row, col = squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)
        old_row, old_col = state.get(name, (torch.zeros_like(row), torch.zeros_like(col)))
        row, col = beta * old_row + (1 - beta) * row, beta * old_col + (1 - beta) * col
        state[name] = row, col
        return (row * col / row.mean(-2, keepdim=True)).sqrt()
