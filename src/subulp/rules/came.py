"""CAME: Adafactor's update, averaged and divided by how much it deviates from its average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from subulp.formula.compose import compose, part, quantity
from subulp.formula.factors import confidence, deviation, weighed
from subulp.formula.rule import Rule, State
from subulp.optimizer import Params
from subulp.options import Options, check_flag, check_fraction, check_nonnegative, check_positive, tuple_of
from subulp.passes import Passes
from subulp.rules.factored import (
    WHOLE,
    factored,
    factored_states,
    second_moments,
    size_of_update,
    square,
    whole_state,
)
from subulp.rules.parts import averaged, decayed, scaled
from subulp.staged import StagedOptimizer


@part("u")
def trusted(m, w):  # type: ignore[no-untyped-def]
    return m * w


MOMENTUM = {"m": State("exp_avg")}
SECOND = {"v": whole_state("exp_avg_sq")}
_RATE = scaled.of(scale="lr")
MATRIX = compose(weighed, averaged, confidence, trusted, _RATE, decayed, states=MOMENTUM)
OTHER = compose(*WHOLE, averaged, _RATE.of(u="m").to("u"), decayed, states={**MOMENTUM, **SECOND})
DEVIATION = quantity(part("u", by_row=["r"], by_col=["c"])(deviation), square, reads=("g", "m"))


class CAME(StagedOptimizer):
    r"""Confidence-guided Adaptive Memory Efficient optimization, with one stochastic rounding a step and tensor.

    At step :math:`t`, in fp32, with :math:`\hat u` Adafactor's clipped direction (constant :math:`\beta_2`), for a
    parameter with two dimensions or more:

    .. math::
        m' &= \beta_1 m + (1-\beta_1)\,\hat u, \qquad
        \hat u = u / \max(1, \text{RMS}(u)/d), \qquad u = g / \sqrt{R' C'/\text{mean}(R')} \\
        S' &= \beta_3 S + (1-\beta_3)\,\text{mean}_{\text{cols}}((\hat u - m')^2 + \epsilon_2) \qquad
        (Q'\text{ likewise over rows}) \\
        p' &= p - \eta\lambda\, p - \eta\, m' / \sqrt{S' Q'/\text{mean}(S')}

    stored as :math:`\mathrm{SR}(p')`, :math:`\mathrm{SR}(m')`; the update uses the unrounded :math:`m'`. Other parameters
    keep a whole second moment and take :math:`p' = p - \eta\lambda p - \eta m'`, as the authors' package does. Means and
    equal bits: see :class:`subulp.Adafactor`.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\eta`.
        eps: :math:`(\epsilon_1, \epsilon_2)`, added to the squares of gradients and of deviations.
        clip_threshold: :math:`d`.
        betas: :math:`(\beta_1, \beta_2, \beta_3)`.
        weight_decay: :math:`\lambda`.
        bias_correction: divide the means S and Q by :math:`1-\beta_3^t`. Off, as published, they start near zero, and the
            first updates are larger by up to :math:`(1-\beta_3)^{-1/2}`, 100 times by default (CAME pull request #6);
            warm up the learning rate then.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), ``exp_avg`` (dtype by ``state_dtype``), ``exp_avg_sq_row``,
    ``exp_avg_sq_col``, ``exp_avg_res_row``, ``exp_avg_res_col`` or else ``exp_avg_sq``, all fp32; ``stream`` (int).

    Source: Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", ACL 2023 (arXiv 2307.02047).
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "eps": tuple_of(check_nonnegative, check_nonnegative),
        "clip_threshold": check_positive,
        "betas": tuple_of(check_fraction, check_fraction, check_fraction),
        "weight_decay": check_nonnegative,
        "bias_correction": check_flag,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Any,
        eps: Sequence[float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: Sequence[float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: dict[str, Any]) -> Rule:
        return MATRIX

    def states(self, group: dict[str, Any], p: Tensor | None = None) -> tuple[State, ...]:
        states: tuple[State, ...] = tuple(MOMENTUM.values())
        if p is None or p.dim() < 2:
            states += tuple(SECOND.values())
        if p is None or p.dim() >= 2:
            states += factored_states("exp_avg_sq") + factored_states("exp_avg_res")
        return states

    def update(self, passes: Passes) -> None:
        group = passes.group
        beta1, beta2, beta3 = map(float, group["betas"])
        lr = float(group["lr"])
        moments = second_moments(passes, "exp_avg_sq", beta2, group["eps"][0])
        clip = (size_of_update(passes, moments, "exp_avg_sq") / group["clip_threshold"]).clamp(min=1.0)
        scalars = {"beta1": beta1, "share": (1 - beta1) / clip, "lr": lr, "decay": lr * group["weight_decay"]}
        if moments.parts is WHOLE:
            passes.apply(OTHER, {**moments.operands, **scalars})
            return
        s, d = factored(
            passes,
            "exp_avg_res",
            beta3,
            group["eps"][1],
            # u / clip - m' = beta1 / clip * (u - clip * m): the factor is taken out of the means.
            scale=(beta1 / clip) ** 2,
            correction=passes.of_step(lambda step: 1 - beta3**step) if group["bias_correction"] else 1.0,
            what=DEVIATION,
            operands={"factor": clip, **moments.operands},
            states={"m": "exp_avg"},
        )
        passes.apply(MATRIX, {"s": s, "d": d, **moments.operands, **scalars})
