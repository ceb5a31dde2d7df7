"""Adam: AdamW's update with the decay in the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from subulp.formula.compose import compose
from subulp.formula.rule import Rule
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_flag
from subulp.rules.adamw import AMSGRAD as DECOUPLED_AMSGRAD
from subulp.rules.adamw import LARGEST, MOMENTS, AdamW, adam_direction
from subulp.rules.adamw import PLAIN as DECOUPLED
from subulp.rules.parts import coupled, interpolated, largest, second_moment, subtracted

PLAIN = compose(coupled, interpolated, second_moment, adam_direction, subtracted, states=MOMENTS)
AMSGRAD = compose(
    coupled, interpolated, second_moment, largest, adam_direction.of(v="v_max"), subtracted, states=LARGEST
)


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

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        scalars = super().scalars(group, step)
        return scalars if group["decoupled_weight_decay"] else {**scalars, "decay": group["weight_decay"]}
