"""Prodigy from its paper (arXiv 2306.02101, algorithm 4), in the parameter's own precision, eps times the present d."""

from __future__ import annotations

from typing import Any

import torch


class ProdigyReference(torch.optim.Optimizer):
    """One group; the estimate is an attribute."""

    def __init__(
        self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, d0: float = 1e-6, **options: Any
    ) -> None:
        defaults = {
            "betas": (0.9, 0.999),
            "beta3": None,
            "eps": 1e-8,
            "decouple": True,
            "use_bias_correction": False,
            "safeguard_warmup": False,
            "growth_rate": float("inf"),
            "d_coef": 1.0,
            "slice_p": 1,
        }
        super().__init__(params, {**defaults, "lr": lr, "weight_decay": weight_decay, "d0": d0, **options})
        self.d = self.d_max = d0
        self.r = 0.0
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        lr, d, d0 = group["lr"], self.d, group["d0"]
        beta1, beta2 = group["betas"]
        beta3 = beta2**0.5 if group["beta3"] is None else group["beta3"]
        self.k += 1
        if group["use_bias_correction"]:
            lr = lr * (1 - beta2**self.k) ** 0.5 / (1 - beta1**self.k)
        weight = d / d0 * (d if group["safeguard_warmup"] else d * lr)
        every = group["slice_p"]
        self.r *= beta3
        norm = 0.0
        for p in group["params"]:
            g = p.grad if group["decouple"] else p.grad + group["weight_decay"] * p
            state = self.state[p]
            if not state:
                state.update(p0=p.clone(), s=torch.zeros_like(p).flatten()[::every])
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            self.r += d / d0 * d * lr * float((g * (state["p0"] - p)).flatten()[::every].sum())
            state["s"] = beta3 * state["s"] + weight * g.flatten()[::every]
            norm += float(state["s"].abs().sum())
            state["m"] = beta1 * state["m"] + (1 - beta1) * d * g
            state["v"] = beta2 * state["v"] + (1 - beta2) * d * d * g * g
            decay = group["weight_decay"] * p if group["decouple"] else 0.0
            p.copy_(p - d * lr * (decay + state["m"] / (state["v"].sqrt() + d * group["eps"])))
        d_hat = group["d_coef"] * self.r / norm
        first = max(d, d_hat) if d == d0 else d
        self.d_max = max(self.d_max, d_hat)
        self.d = min(self.d_max, first * group["growth_rate"])
