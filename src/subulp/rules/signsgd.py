"""SignSGD, and Signum: the sign of the gradient, or of its average."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import Unpack

from subulp.formula.compose import compose
from subulp.formula.rule import Rule, State
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_fraction, check_nonnegative
from subulp.rules.parts import decayed, interpolated, scaled, signed

_RATE = scaled.of(scale="lr")
PLAIN = compose(signed.of(u="g").to("u"), _RATE, decayed)
MOMENTUM = compose(
    interpolated.of(m="b", one_minus_beta1="one_minus_momentum"),
    signed.of(u="b").to("u"),
    _RATE,
    decayed,
    states={"b": State("momentum_buffer")},
)


class SignSGD(Optimizer):
    r"""SignSGD, with momentum Signum; every low-precision store stochastically rounded once.

    In fp32, with gradient :math:`g` and stored :math:`p, b`:

    .. math::
        b' = b + (1-\mu)(g - b) \qquad p' = p - \eta(\lambda p + \operatorname{sign}(b'))

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(b')`. Without momentum the sign is the gradient's, and no buffer is kept.
    The sign of 0 is 0.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\eta \ge 0`, a float or a one-element tensor.
        momentum: :math:`\mu` in [0, 1).
        weight_decay: :math:`\lambda \ge 0`, decoupled.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), with momentum ``momentum_buffer`` (shape of the parameter, dtype by
    ``state_dtype``), ``stream`` (int).

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018 (arXiv 1802.04434).
    """

    hyperparameters: ClassVar[dict[str, Any]] = {"momentum": check_fraction, "weight_decay": check_nonnegative}

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-4,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, options)

    def rule(self, group: dict[str, Any]) -> Rule:
        return PLAIN if group["momentum"] == 0 else MOMENTUM

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        scalars = {"decay": group["lr"] * group["weight_decay"], "lr": group["lr"]}
        return scalars if group["momentum"] == 0 else {**scalars, "one_minus_momentum": 1 - group["momentum"]}
