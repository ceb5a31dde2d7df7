"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import Unpack

from subulp.formula.compose import compose, part
from subulp.formula.ops import sign
from subulp.formula.rule import Rule, State
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_betas, check_nonnegative
from subulp.rules.parts import decayed, interpolated, scaled


@part("u")
def lion_direction(m, g, one_minus_beta1):  # type: ignore[no-untyped-def]
    return sign(m + one_minus_beta1 * (g - m))


RULE = compose(
    lion_direction,
    scaled.of(scale="lr"),
    interpolated.of(one_minus_beta1="one_minus_beta2"),
    decayed,
    states={"m": State("exp_avg")},
)


class Lion(Optimizer):
    r"""EvoLved Sign Momentum, every low-precision store stochastically rounded once.

    In fp32, with gradient :math:`g` and stored :math:`p, m`:

    .. math::
        p' = p - \eta\big(\lambda p + \operatorname{sign}(m + (1-\beta_1)(g - m))\big) \qquad
        m' = m + (1-\beta_2)(g - m)

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(m')`. The sign of 0 is 0.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\eta \ge 0`, a float or a one-element tensor; the authors advise a third to a tenth of AdamW's.
        betas: :math:`(\beta_1, \beta_2)`, each in [0, 1).
        weight_decay: :math:`\lambda \ge 0`.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), ``exp_avg`` (shape of the parameter, dtype by ``state_dtype``), ``stream``.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023 (arXiv 2302.06675). Stochastic
    rounding for Lion: OneTrainer issue #739.
    """

    hyperparameters: ClassVar[dict[str, Any]] = {"betas": check_betas, "weight_decay": check_nonnegative}

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, options)

    def rule(self, group: dict[str, Any]) -> Rule:
        return RULE

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        lr = group["lr"]
        beta1, beta2 = group["betas"]
        return {
            "decay": lr * group["weight_decay"],
            "lr": lr,
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta2": 1 - beta2,
        }
