"""AdamW for bf16 weights as OneTrainer has it, written again from a description of its operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subulp

Store = Callable[[int, Tensor, Tensor, Tensor, float, int], None]
"""``store(i, p, numerator, denominator, value, step)``: ``p + value * numerator / denominator`` in fp32, rounded into ``p``.

``i`` is the parameter's position among all, ``step`` its count of updates.
"""


class WeightOnlyAdamW(torch.optim.Optimizer):
    """AdamW whose bf16 decay, moments and denominator round to nearest op by op, and whose weight rounds stochastically.

    The order of operations of OneTrainer's ``util/optimizer/adamw_extensions.py``, one parameter after another: decay
    ``p *= 1 - lr * weight_decay`` in bf16, where a decay below half an ulp is lost (OneTrainer issue 996); both moments in
    bf16, where ``exp_avg_sq`` sticks (issue 1005); then ``p + (-lr / bias1) * exp_avg / denominator`` in fp32, which
    ``store`` rounds.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, store: Store
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.store = store

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; there is no closure here."""
        members = [(group, p) for group in self.param_groups for p in group["params"]]
        for i, (group, p) in enumerate(members):
            if p.grad is not None:
                self._update(i, p, p.grad, group)

    def _update(self, i: int, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root_bias2 = math.sqrt(1 - beta2 ** state["step"])
        denominator = (state["exp_avg_sq"].sqrt() / root_bias2).add_(group["eps"])
        step_size = group["lr"] / (1 - beta1 ** state["step"])
        self.store(i, p, state["exp_avg"], denominator, -step_size, state["step"])


def with_subulps_noise(seed: int) -> Store:
    """A store whose noise is a function of the seed, the position, the step and the element alone."""

    def store(i: int, p: Tensor, numerator: Tensor, denominator: Tensor, value: float, step: int) -> None:
        subulp.addcdiv_stochastic_(p, numerator, denominator, value=value, seed=seed, stream=i, step=step)

    return store


def with_torchs_noise(seed: int) -> Store:
    """A store whose noise comes from one torch generator, as OneTrainer's does, and takes its time."""
    generator = torch.Generator().manual_seed(seed)

    def store(i: int, p: Tensor, numerator: Tensor, denominator: Tensor, value: float, step: int) -> None:
        add_noise_and_cut(p, p.float().addcdiv_(numerator.float(), denominator.float(), value=value), generator)

    return store


def add_noise_and_cut(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Stores fp32 ``source`` into bf16 ``target``: 16 random bits are added below the bits that bf16 keeps."""
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, generator=generator)
    noise.add_(source.view(torch.int32)).bitwise_and_(-65536)
    target.copy_(noise.view(torch.float32))
