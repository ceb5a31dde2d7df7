"""OneTrainer's AdamW for bf16 weights, written again from a description of its operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_noise_and_cut(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Stores fp32 ``source`` into bf16 ``target``: 16 random bits are added below the bits that bf16 keeps."""
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, generator=generator)
    noise.add_(source.view(torch.int32)).bitwise_and_(-65536)
    target.copy_(noise.view(torch.float32))


class OneTrainerAdamW(torch.optim.Optimizer):
    """AdamW whose bf16 decay, moments and denominator round to nearest op by op, and whose weight rounds stochastically.

    One parameter after another: decay ``p *= 1 - lr * weight_decay`` in bf16, where a decay below half an ulp is lost
    (OneTrainer issue 996); both moments in bf16, where ``exp_avg_sq`` sticks (issue 1005); then
    ``p + (-lr / bias1) * exp_avg / denominator`` in fp32, rounded with noise from one generator.
    """

    def __init__(
        self, params: list[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; there is no closure here."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root_bias2 = (1 - beta2 ** state["step"]) ** 0.5
        denominator = (state["exp_avg_sq"].sqrt() / root_bias2).add_(group["eps"])
        step_size = group["lr"] / (1 - beta1 ** state["step"])
        updated = p.float().addcdiv_(state["exp_avg"].float(), denominator.float(), value=-step_size)
        add_noise_and_cut(p, updated, self.generator)
