"""Stochastic gradient descent with momentum, as in torch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from subulp.formula.compose import compose, part
from subulp.formula.rule import Rule, State
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_flag, check_nonnegative
from subulp.rules.parts import coupled, scaled, subtracted


@part("b")
def accumulated(b, g, momentum, share):  # type: ignore[no-untyped-def]
    return momentum * b + share * g


@part("u")
def nesterov_direction(g, b, momentum):  # type: ignore[no-untyped-def]
    return g + momentum * b


_RATE = scaled.of(scale="lr")
BUFFER = {"b": State("momentum_buffer")}
PLAIN = compose(coupled, _RATE.of(u="g"), subtracted.of(u="g"))
MOMENTUM = compose(coupled, accumulated, _RATE.of(u="b").to("u"), subtracted, states=BUFFER)
NESTEROV = compose(coupled, accumulated, nesterov_direction, _RATE, subtracted, states=BUFFER)


class SGD(Optimizer):
    r"""Stochastic gradient descent, every low-precision store stochastically rounded once.

    In fp32, with gradient :math:`g` and stored :math:`p, b`:

    .. math::
        g' &= g + \lambda p \qquad b' = \mu b + (1-\tau) g' \quad (\tau = 0 \text{ at the first step}) \\
        p' &= p - \eta b' \quad \text{or, with nesterov,} \quad p' = p - \eta (g' + \mu b')

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(b')`. Without momentum :math:`p' = p - \eta g'`, and no buffer is kept.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\eta \ge 0`, a float or a one-element tensor.
        momentum: :math:`\mu \ge 0`.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda \ge 0`, added to the gradient.
        nesterov: needs momentum and no dampening.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), with momentum ``momentum_buffer`` (shape of the parameter, dtype by
    ``state_dtype``), ``stream`` (int).

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013; torch.optim.SGD.
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "momentum": check_nonnegative,
        "dampening": check_nonnegative,
        "weight_decay": check_nonnegative,
        "nesterov": check_flag,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, options)

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r}{where}: it needs "
                "momentum > 0 and dampening 0."
            )

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        entry = self.state[p]
        # torch's SGD counts no steps; a buffer shows that there were some, and that dampening applies.
        if "momentum_buffer" in entry and "step" not in entry:
            entry["step"] = torch.ones((), dtype=torch.float64)
        return super()._state_of(p, group)

    def rule(self, group: dict[str, Any]) -> Rule:
        if group["momentum"] == 0:
            return PLAIN
        return NESTEROV if group["nesterov"] else MOMENTUM

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        scalars = {"decay": group["weight_decay"], "lr": group["lr"]}
        if group["momentum"] != 0:
            scalars |= {"momentum": group["momentum"], "share": 1.0 - group["dampening"] * (step > 1)}
        return scalars
