"""Lion and Signum from their papers, in the parameter's own precision."""

from __future__ import annotations

from typing import Any

import torch


class SignReference(torch.optim.Optimizer):
    """With ``betas`` Lion (arXiv 2302.06675, algorithm 2), with ``momentum`` Signum (arXiv 1802.04434, algorithm 2)."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.99),
        momentum: float | None = None,
    ) -> None:
        inner, outer = betas if momentum is None else (momentum, momentum)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "inner": inner, "outer": outer})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].get("m", torch.zeros_like(p))
                direction = torch.sign(group["inner"] * m + (1 - group["inner"]) * p.grad)
                self.state[p]["m"] = group["outer"] * m + (1 - group["outer"]) * p.grad
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction)
