"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import Unpack

from subulp.formula.compose import compose, part
from subulp.formula.ops import div, sqrt
from subulp.formula.rule import Rule, State
from subulp.optimizer import Optimizer, Params
from subulp.options import Options, check_betas, check_flag, check_nonnegative
from subulp.rules.parts import decayed, interpolated, largest, second_moment


@part("u")
def adam_direction(m, v, eps, step_size, rsqrt_bias2):  # type: ignore[no-untyped-def]
    return step_size * div(m, sqrt(v) * rsqrt_bias2 + eps)


MOMENTS = {"m": State("exp_avg"), "v": State("exp_avg_sq", squared=True)}
LARGEST = {**MOMENTS, "v_max": State("max_exp_avg_sq", squared=True, alias="exp_avg_sq")}
PLAIN = compose(interpolated, second_moment, adam_direction, decayed, states=MOMENTS)
AMSGRAD = compose(interpolated, second_moment, largest, adam_direction.of(v="v_max"), decayed, states=LARGEST)


def scalars_of(group: dict[str, Any], step: Any) -> dict[str, Any]:
    """The scalars of AdamW's rules."""
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    return {
        "decay": lr * group["weight_decay"],
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": group["eps"],
        "step_size": lr / (1 - beta1**step),
        "rsqrt_bias2": (1 - beta2**step) ** -0.5,
    }


class AdamW(Optimizer):
    r"""Adam with decoupled weight decay, every low-precision store stochastically rounded once.

    At step :math:`t`, in fp32, with gradient :math:`g` and stored :math:`p, m, v`:

    .. math::
        m' &= m + (1-\beta_1)(g - m) \qquad v' = \beta_2 v + (1-\beta_2) g^2 \\
        p' &= p - \Big(\eta\lambda\, p
              + \frac{\eta}{1-\beta_1^t} \cdot \frac{m'}{\sqrt{v'}/\sqrt{1-\beta_2^t} + \epsilon}\Big)

    and then ``p``, ``exp_avg``, ``exp_avg_sq`` are stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(m'), \mathrm{SR}(v')`.
    The update uses the unrounded :math:`m', v'`. Decay is a term of the same sum, so that a decay below one ulp of the
    weight still counts in expectation. With ``amsgrad`` the denominator uses
    :math:`\hat v' = \max(\hat v, v')`, kept as ``max_exp_avg_sq``.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``. With names
            (``model.named_parameters()``) the noise follows the name, else the position.
        lr: :math:`\eta \ge 0`, a float or a one-element tensor.
        betas: :math:`(\beta_1, \beta_2)`, each in [0, 1).
        eps: :math:`\epsilon \ge 0`.
        weight_decay: :math:`\lambda \ge 0`.
        amsgrad: use the maximum of past second moments.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq`` (the shape of
    the parameter, dtypes by ``state_dtype``), ``stream`` (int, the noise stream).

    Raises:
        ValueError, TypeError: a hyper-parameter out of its range or of the wrong type (at construction, in
            ``add_param_group`` or, for a group that was edited, in ``step`` before anything changes).
        RuntimeError: a sparse gradient.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019 (arXiv 1711.05101); amsgrad: Reddi
    et al., ICLR 2018. Stochastic rounding of the moments: OneTrainer issue #1005; decay inside the sum: issue #996.
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "betas": check_betas,
        "eps": check_nonnegative,
        "weight_decay": check_nonnegative,
        "amsgrad": check_flag,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}, options
        )

    def rule(self, group: dict[str, Any]) -> Rule:
        return AMSGRAD if group["amsgrad"] else PLAIN

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        return scalars_of(group, step)
