"""Adam: AdamW's update with the decay in the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from subulp.formula.ops import maximum
from subulp.formula.rule import Rule
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_flag
from subulp.rules.adamw import AMSGRAD as DECOUPLED_AMSGRAD
from subulp.rules.adamw import PLAIN as DECOUPLED
from subulp.rules.adamw import AdamW, change, moments


def adam(p, m, v, g, decay, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, rsqrt_bias2):  # type: ignore[no-untyped-def]
    m, v = moments(g + decay * p, m, v, one_minus_beta1, beta2, one_minus_beta2)
    return p - change(m, v, eps, step_size, rsqrt_bias2), m, v


def adam_amsgrad(p, m, v, v_max, g, decay, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, rsqrt_bias2):  # type: ignore[no-untyped-def]
    m, v = moments(g + decay * p, m, v, one_minus_beta1, beta2, one_minus_beta2)
    v_max = maximum(v_max, v)
    return p - change(m, v_max, eps, step_size, rsqrt_bias2), m, v, v_max


PLAIN = Rule(adam, DECOUPLED.states)
AMSGRAD = Rule(adam_amsgrad, DECOUPLED_AMSGRAD.states)


class Adam(AdamW):
    r"""Adam with L2 decay, every low-precision store stochastically rounded once.

    At step :math:`t`, in fp32, with gradient :math:`g` and stored :math:`p, m, v`:

    .. math::
        g' &= g + \lambda p \qquad
        m' = m + (1-\beta_1)(g' - m) \qquad v' = \beta_2 v + (1-\beta_2) g'^2 \\
        p' &= p - \frac{\eta}{1-\beta_1^t} \cdot \frac{m'}{\sqrt{v'}/\sqrt{1-\beta_2^t} + \epsilon}

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(m'), \mathrm{SR}(v')`. The update uses the unrounded :math:`m', v'`.

    Args:
        params, lr, betas, eps, amsgrad, options: as in :class:`subulp.AdamW`.
        weight_decay: :math:`\lambda \ge 0`, added to the gradient.
        decoupled_weight_decay: decay as AdamW does instead.

    State and errors: as in :class:`subulp.AdamW`.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015 (arXiv 1412.6980).
    """

    hyperparameters = AdamW.hyperparameters | {"decoupled_weight_decay": check_flag}

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        Optimizer.__init__(self, params, defaults, options)  # AdamW's has no last keyword

    def rule(self, group: dict[str, Any]) -> Rule:
        if group["decoupled_weight_decay"]:
            return DECOUPLED_AMSGRAD if group["amsgrad"] else DECOUPLED
        return AMSGRAD if group["amsgrad"] else PLAIN

    def scalars(self, group: dict[str, Any], step: Any) -> tuple[Any, ...]:
        decay, *rest = super().scalars(group, step)
        return (decay if group["decoupled_weight_decay"] else group["weight_decay"], *rest)
