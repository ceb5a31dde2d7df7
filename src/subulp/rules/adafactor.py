"""Adafactor: second moments as row and column means, step sizes relative to the parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from subulp.formula.compose import Part, compose, quantity
from subulp.formula.factors import weighed
from subulp.formula.rule import Rule, State
from subulp.optimizer import Params
from subulp.options import (
    Options,
    as_real,
    check_flag,
    check_fraction,
    check_nonnegative,
    check_positive,
    one_of,
    optional,
    tuple_of,
)
from subulp.passes import Passes
from subulp.rules.factored import WHOLE, factored_states, second_moments, size_of_update, square, whole_state
from subulp.rules.parts import averaged, decayed, scaled
from subulp.staged import StagedOptimizer

STEP = (scaled, decayed)
AVERAGED = (averaged.of(share="scale"), decayed.of(u="m"))
MOMENTUM = {"m": State("exp_avg")}
SECOND = {"v": whole_state("exp_avg_sq")}
OF_PARAMETER = quantity(square.of(u="p").to("x"), reads=("p",))


def _check_decay_rate(what: str, value: Any) -> Any:
    if not -math.inf < as_real(what, value) <= 0:
        raise ValueError(f"{what}={value!r}: must be a finite number <= 0, e.g. -0.8.")
    return value


class Adafactor(StagedOptimizer):
    r"""Adafactor with the semantics of transformers (or torch), and one stochastic rounding a step.

    At step :math:`t`, in fp32, with gradient :math:`g` of a parameter with two dimensions or more, and
    :math:`\hat\beta_2 = 1 - t^{\text{decay\_rate}}`:

    .. math::
        R' &= \hat\beta_2 R + (1-\hat\beta_2)\,\text{mean}_{\text{cols}}(g^2 + \epsilon_1) \qquad
        C' = \hat\beta_2 C + (1-\hat\beta_2)\,\text{mean}_{\text{rows}}(g^2 + \epsilon_1) \\
        u &= g \,/ \sqrt{R' C' / \text{mean}(R')} \qquad
        \alpha = \rho_t \max(\epsilon_2, \text{RMS}(p)) \\
        p' &= p - \alpha\lambda\, p - \alpha\, u / \max(1, \text{RMS}(u)/d)

    stored as :math:`\mathrm{SR}(p')`; other parameters keep a whole :math:`v`. With ``beta1`` the last term is averaged:
    :math:`m' = \beta_1 m + (1-\beta_1)\,\alpha u / \max(\ldots)`, stored as :math:`\mathrm{SR}(m')`.

    Means are over the whole parameter, also when it is sharded (FSDP2, tensor parallel). They are summed in fp64 and
    rounded once, see :class:`subulp.staged.StagedOptimizer` for what that means for equal bits.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\rho_t`. None with ``relative_step``, which sets it to ``min(1e-2, 1/sqrt(t))``.
        eps: :math:`(\epsilon_1, \epsilon_2)`. None: (1e-30, 1e-3) or, with torch's semantics, (None, 1e-3), where None is
            the machine epsilon of the parameter's dtype.
        clip_threshold: :math:`d`, the largest root mean square of an update.
        decay_rate: exponent of :math:`t` in :math:`\hat\beta_2`, negative.
        beta1: decay of the momentum; None: no momentum is kept.
        weight_decay: :math:`\lambda`.
        scale_parameter: multiply the step by the parameter's root mean square; else :math:`\alpha = \rho_t`.
        relative_step: see ``lr``. None (the default): only where no lr is given, for a group as for the whole. transformers
            takes True for it and so refuses every lr unless told otherwise; here an lr that is given is used.
        warmup_init: with ``relative_step``: ``min(1e-6 * t, 1/sqrt(t))``.
        semantics: "transformers" as above; "torch" as ``torch.optim.Adafactor``, whose lr is 1e-2 by default:
            :math:`\rho_t = \min(lr, 1/\sqrt t)`, decay by :math:`lr\,\lambda`, :math:`\epsilon_1` not added to squares but
            a lower limit of mean(R') and, squared, of v.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), ``exp_avg_sq_row`` (shape without the last dimension) and ``exp_avg_sq_col``
    (without the last but one) or else ``exp_avg_sq``, all fp32; with beta1 ``exp_avg`` (dtype by ``state_dtype``);
    ``RMS`` (0-d fp32, of the parameter before the step); ``stream`` (int). Checkpoints of transformers' Adafactor load.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018 (arXiv
    1804.04235); transformers' ``Adafactor``. One rounding a step: OneTrainer issue #994.
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "lr": optional(check_nonnegative),
        "eps": optional(tuple_of(optional(check_nonnegative), check_nonnegative)),
        "clip_threshold": check_positive,
        "decay_rate": _check_decay_rate,
        "beta1": optional(check_fraction),
        "weight_decay": check_nonnegative,
        "scale_parameter": check_flag,
        "relative_step": optional(check_flag),
        "warmup_init": check_flag,
        "semantics": one_of("transformers", "torch"),
    }

    own_settings = ("_given",)

    def __init__(
        self,
        params: Params,
        lr: float | Any = None,
        eps: Sequence[float | None] | None = None,
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool | None = None,
        warmup_init: bool = False,
        semantics: str = "transformers",
        **options: Unpack[Options],
    ) -> None:
        self._given = {"lr": lr, "eps": eps, "relative_step": relative_step, "semantics": semantics}
        defaults = {
            **self._resolved({}),
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "warmup_init": warmup_init,
        }
        if semantics == "transformers" and lr is not None and relative_step:
            raise ValueError(
                f"lr={lr!r} with relative_step=True: the step size is set by one of them. Pass relative_step=False to use lr."
            )
        super().__init__(params, defaults, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; what is None by default follows from the group's own semantics and lr."""
        param_group.update(self._resolved(param_group))
        super().add_param_group(param_group)

    def _resolved(self, group: dict[str, Any]) -> dict[str, Any]:
        given = {**self._given, **group}
        lr, eps, relative_step, semantics = (given[name] for name in ("lr", "eps", "relative_step", "semantics"))
        is_torch = semantics == "torch"
        if eps is None:
            eps = (None, 1e-3) if is_torch else (1e-30, 1e-3)
        if relative_step is None:
            relative_step = lr is None and not is_torch
        return {
            "lr": 1e-2 if lr is None and is_torch else lr,
            "eps": eps,
            "relative_step": relative_step,
            "semantics": semantics,
        }

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        if group["semantics"] == "torch" or "params" not in group:  # groups may bring rates of their own
            return
        if group["lr"] is None and not group["relative_step"]:
            raise ValueError(f"lr=None with relative_step=False{where}: nothing sets the step size. Pass one of them.")
        if group["warmup_init"] and not group["relative_step"]:
            raise ValueError(
                f"warmup_init=True with relative_step=False{where}: it warms up the relative step. Pass both."
            )
        if group["eps"][0] is None:
            raise ValueError(f"eps={group['eps']!r}{where}: the first may be None with semantics='torch' only.")

    def rule(self, group: dict[str, Any]) -> Rule:
        return self._rule(group, (weighed,))

    def _rule(self, group: dict[str, Any], parts: tuple[Part, ...]) -> Rule:
        momentum = {} if group["beta1"] is None else MOMENTUM
        rest = STEP if group["beta1"] is None else AVERAGED
        return compose(*parts, *rest, states=momentum | (SECOND if parts is WHOLE else {}))

    def states(self, group: dict[str, Any], p: Tensor | None = None) -> tuple[State, ...]:
        second = () if p is not None and p.dim() >= 2 else tuple(SECOND.values())
        if p is None or p.dim() >= 2:
            second += factored_states("exp_avg_sq")
        return (*self.rule(group).states, *second)

    def update(self, passes: Passes) -> None:
        group = passes.group
        (total,) = passes.sum(OF_PARAMETER)
        rms = (total / passes.kind.numel).sqrt()
        torch._foreach_copy_([state["RMS"] for state in passes.states], list(rms.float().unbind()))
        beta2 = passes.of_step(lambda step: 1 - step ** group["decay_rate"])
        floor, clamp = group["eps"][0], None
        if group["semantics"] == "torch":
            floor, clamp = 0.0, torch.finfo(passes.params[0].dtype).eps if floor is None else floor
        moments = second_moments(passes, "exp_avg_sq", beta2, floor, clamp)
        lr = _step_size(group, passes.of_step(partial(_rate, group)), rms)
        clip = (size_of_update(passes, moments, "exp_avg_sq") / group["clip_threshold"]).clamp(min=1.0)
        decay = group["weight_decay"] * (group["lr"] if group["semantics"] == "torch" else lr)
        beta1 = group["beta1"]
        scalars = {"scale": lr / clip if beta1 is None else (1 - beta1) * lr / clip, "decay": decay}
        if beta1 is not None:
            scalars["beta1"] = beta1
        passes.apply(self._rule(group, moments.parts), {**moments.operands, **scalars})

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._state_of(p, group)
        # Made with the rest: a flattened checkpoint only loads the names that the state has by then.
        if not isinstance(state.get("RMS"), Tensor):  # checkpoints of transformers may bring a number
            state["RMS"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state

    @staticmethod
    def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> float:
        """The step size of a parameter; ``transformers.AdafactorSchedule`` calls it."""
        rms = param_state.get("RMS", 0.0)
        step = max(1.0, float(param_state.get("step", 1)))
        return float(_step_size(param_group, _rate(param_group, step), torch.as_tensor(rms, dtype=torch.float64)))


def _rate(group: dict[str, Any], step: float) -> float:
    size: Any = group["lr"] if group["lr"] is None or not isinstance(group["lr"], Tensor) else float(group["lr"])
    if group["semantics"] == "torch":
        size = min(size, 1 / math.sqrt(step))
    elif group["relative_step"]:
        size = min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / math.sqrt(step))
    return float(size)


def _step_size(group: dict[str, Any], rate: Any, rms: Tensor) -> Any:
    return rate * rms.clamp(min=group["eps"][1]) if group["scale_parameter"] or group["semantics"] == "torch" else rate
