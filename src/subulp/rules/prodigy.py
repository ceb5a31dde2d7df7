"""Prodigy: Adam whose step size is estimated from the distance it has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from subulp.backends.eager_sums import sum_last
from subulp.batch import Batch
from subulp.formula.compose import compose, part, quantity
from subulp.formula.ops import absolute, div, sqrt
from subulp.formula.rule import Rule, State
from subulp.optimizer import Params
from subulp.options import (
    Options,
    as_real,
    check_betas,
    check_counter,
    check_flag,
    check_fraction,
    check_nonnegative,
    check_positive,
    optional,
)
from subulp.passes import Passes
from subulp.rules.parts import averaged, coupled, decayed, second_moment
from subulp.staged import StagedOptimizer
from subulp.torch_internals import is_dtensor, local_tensor


@part("u")
def prodigy_direction(m, v, eps, step_size):  # type: ignore[no-untyped-def]
    return step_size * div(m, sqrt(v) + eps)


RULE = compose(
    coupled.of(decay="coupled"),
    averaged.of(u="g", share="gain1"),
    second_moment.of(one_minus_beta2="gain2"),
    prodigy_direction,
    decayed.of(decay="decoupled"),
    states={"m": State("exp_avg"), "v": State("exp_avg_sq", squared=True)},
)


@part("p")
def accumulated(p, g, beta3, weight):  # type: ignore[no-untyped-def]
    return beta3 * p + weight * g


@part("x")
def alignment(g, p, p0):  # type: ignore[no-untyped-def]
    return g * (p0 - p)


@part("x")
def magnitude(s):  # type: ignore[no-untyped-def]
    return absolute(s)


_COUPLED = coupled.of(p="w", decay="coupled")
ACCUMULATE = compose(_COUPLED, accumulated, reads=("g", "w"))
"""The update of s."""
ALIGNMENT = quantity(coupled.of(decay="coupled"), alignment, reads=("g", "p", "p0"))
SIZE = quantity(magnitude, reads=("s",))


def _check_growth_rate(what: str, value: Any) -> Any:
    if not as_real(what, value) >= 1.0:
        raise ValueError(f"{what}={value!r}: must be at least 1 (infinity: no limit).")
    return value


def _check_slice(what: str, value: Any) -> int:
    if check_counter(what, value, 31) < 1:
        raise ValueError(f"{what}={value!r}: must be at least 1.")
    return int(value)


class Prodigy(StagedOptimizer):
    r"""Prodigy, every low-precision store stochastically rounded once, and its estimate kept in fp64.

    With :math:`d_0` given, and for all parameters together, at step :math:`k` with gradients :math:`g_k` at :math:`p_k`
    (:math:`\gamma` is lr, times :math:`\sqrt{1-\beta_2^{k+1}}/(1-\beta_1^{k+1})` with ``use_bias_correction``):

    .. math::
        r_{k+1} &= \beta_3 r_k + \tfrac{d_k}{d_0}\gamma d_k \langle g_k, p_0 - p_k\rangle \qquad
        s_{k+1} = \beta_3 s_k + \tfrac{d_k}{d_0}\gamma d_k\, g_k \\
        \hat d &= c\, r_{k+1} / \lVert s_{k+1}\rVert_1 \qquad
        d_{k+1} = \min(\max_{i \le k} \hat d_i,\ \text{growth\_rate} \cdot d_k) \\
        m' &= \beta_1 m + (1-\beta_1) d_k g \qquad v' = \beta_2 v + (1-\beta_2) d_k^2 g^2 \\
        p' &= p - \gamma d_k \lambda p - \gamma d_k\, m' / (\sqrt{v'} + d_k \epsilon)

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(m'), \mathrm{SR}(v')`. In bf16 with rounding to nearest :math:`p_k - p_0`
    stays zero and :math:`d` never grows; here it does. s is fp32; r, d and all sums are fp64 and stay on the device.

    Two details differ from the authors' package: :math:`\epsilon` is multiplied by :math:`d_k`, not :math:`d_{k+1}`, so that
    a parameter can be updated before the gradients of all others exist; and with ``slice_p`` the sample is of the global
    row-major order.

    After updates in the backward pass (``step_parameter``) call ``step()`` once a step, as trainers do: it finds no
    gradients, and updates :math:`d`.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: a factor of the estimated rate, 1 by default; schedulers change it. The same in all groups, or 0.
        betas: :math:`(\beta_1, \beta_2)`.
        beta3: None: :math:`\sqrt{\beta_2}`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        decouple: decay as AdamW does (True), or in the gradient.
        use_bias_correction: see above.
        safeguard_warmup: leave lr out of s, so that a warm-up does not inflate d.
        d0: the first estimate.
        d_coef: :math:`c`.
        growth_rate: see above.
        slice_p: keep s and p_0 of every so many-th element only; 1 for sharded parameters.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    Groups hold ``d``, ``d_max``, ``d_numerator``, ``d_denom`` and ``d_hat`` (0-d fp64 tensors) and ``k`` (int).
    State, per parameter: ``step`` (0-d fp32), ``exp_avg``, ``exp_avg_sq`` (dtypes by ``state_dtype``), ``s`` (fp32), ``p0``
    (the parameter's dtype), ``stream`` (int).

    Source: Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", ICML 2024 (arXiv
    2306.06101). An estimate that does not grow in bf16: prodigy issue #27, OneTrainer issue #412.
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "betas": check_betas,
        "beta3": optional(check_fraction),
        "eps": check_nonnegative,
        "weight_decay": check_nonnegative,
        "decouple": check_flag,
        "use_bias_correction": check_flag,
        "safeguard_warmup": check_flag,
        "d0": check_positive,
        "d_coef": check_positive,
        "growth_rate": _check_growth_rate,
        "slice_p": _check_slice,
    }
    run_state = frozenset(("d", "d_max", "d_numerator", "d_denom", "d_hat", "k"))

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1.0,
        betas: Sequence[float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        slice_p: int = 1,
        **options: Unpack[Options],
    ) -> None:
        start = torch.tensor(as_real("d0", d0), dtype=torch.float64)
        estimate = {
            "d": start,
            "d_max": start,
            "d_numerator": torch.zeros((), dtype=torch.float64),
            "d_denom": torch.zeros((), dtype=torch.float64),
            "d_hat": torch.zeros((), dtype=torch.float64),
            "k": 0,
        }
        defaults = {
            "lr": lr,
            "betas": betas,
            "beta3": beta3,
            "eps": eps,
            "weight_decay": weight_decay,
            "decouple": decouple,
            "use_bias_correction": use_bias_correction,
            "safeguard_warmup": safeguard_warmup,
            "d0": d0,
            "d_coef": d_coef,
            "growth_rate": growth_rate,
            "slice_p": slice_p,
        }
        super().__init__(params, {**defaults, **estimate}, options)

    def rule(self, group: dict[str, Any]) -> Rule:
        return RULE

    def states(self, group: dict[str, Any], p: Tensor | None = None) -> tuple[State, ...]:
        return (
            *RULE.states,
            State("s", fp32=True, every=group["slice_p"], restarts=True),
            State("p0", own=True, every=group["slice_p"], restarts=True),
        )

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        fresh = "p0" not in self.state[p]
        state = super()._state_of(p, group)
        if fresh:
            if group["slice_p"] > 1 and is_dtensor(p):
                raise ValueError(f"slice_p={group['slice_p']} with a sharded parameter: pass slice_p=1.")
            local, every = local_tensor(p), group["slice_p"]
            local_tensor(state["p0"]).copy_(local if every == 1 else local.reshape(-1)[::every])
        return state

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._pending: list[tuple[list[int], Tensor]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the authors' package keeps floats
            group.update((key, torch.as_tensor(group[key], dtype=torch.float64)) for key in self.run_state - {"k"})

    def _rate(self) -> float:
        """The common lr of the groups that train."""
        rates = {float(group["lr"]) for group in self.param_groups} - {0.0}
        if len(rates) > 1:
            raise ValueError(
                f"The groups have rates {sorted(rates)}: Prodigy estimates one; use one lr, or 0 to pause a group."
            )
        return rates.pop() if rates else 0.0

    def _correction(self) -> float:
        group = self.param_groups[0]
        beta1, beta2 = map(float, group["betas"])
        k = group["k"] + 1
        return math.sqrt(1 - beta2**k) / (1 - beta1**k) if group["use_bias_correction"] else 1.0

    def _prepared(self, batch: Batch) -> Callable[[], None]:
        for i, other in enumerate(self.param_groups):
            self._recheck(other, f" (param group {i})")
        self._rate()  # raises before anything changes
        return super()._prepared(batch)

    def update(self, passes: Passes) -> None:
        group = passes.group
        lr = self._rate()
        if float(group["lr"]) == 0.0 or lr == 0.0:
            return
        d = self.param_groups[0]["d"].to(passes.kind.device)
        first = self.param_groups[0]["d0"]
        rate = d * lr * self._correction()
        beta1, beta2 = map(float, group["betas"])
        beta3 = math.sqrt(beta2) if group["beta3"] is None else float(group["beta3"])
        decay = float(group["weight_decay"])
        scalars = {
            "decoupled": rate * decay if group["decouple"] else 0.0,
            "coupled": 0.0 if group["decouple"] else decay,
        }
        weight = d / first * (d if group["safeguard_warmup"] else rate)
        self._measure(passes, weight, d / first * rate, beta3, scalars["coupled"])
        scalars |= {"beta1": beta1, "gain1": d * (1 - beta1), "beta2": beta2, "gain2": d * d * (1 - beta2)}
        passes.apply(RULE, {**scalars, "step_size": rate, "eps": d * group["eps"]})

    def _measure(self, passes: Passes, weight: Tensor, share: Tensor, beta3: float, coupled: float) -> None:
        """Updates s, and adds each parameter's part of r and of the norm of s to what is pending."""
        every = passes.group["slice_p"]
        (aligned,) = passes.sum(ALIGNMENT, operands={"coupled": coupled}, states={"p0": "p0"}, every=every)
        reads = {name: passes.sampled(name, every) for name in ("g", "p")}
        passes.apply(
            ACCUMULATE,
            {"beta3": beta3, "weight": weight, "coupled": coupled},
            reads={"g": reads["g"], "w": reads["p"]},
            target="s",
        )
        (size,) = passes.sum(SIZE, states={"s": "s"}, every=every)
        # A list, since fused backward comes from several threads; added up in the order of streams, whichever came first.
        sums = torch.stack([share * aligned, size], dim=1).to(self.param_groups[0]["d_numerator"].device)
        self._pending.append((list(passes.kind.stacks.streams), sums))

    def finish_step(self) -> None:
        """Updates the estimate from what all parameters have added since the last step."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        group = self.param_groups[0]
        every = sorted(
            [(stream, pair) for streams, sums in pending for stream, pair in zip(streams, sums.unbind(), strict=True)],
            key=lambda entry: entry[0],
        )
        added, denominator = sum_last(torch.stack([pair for _, pair in every], dim=1))
        beta3 = math.sqrt(float(group["betas"][1])) if group["beta3"] is None else float(group["beta3"])
        numerator = beta3 * group["d_numerator"] + added
        d, d0 = group["d"], group["d0"]
        d_hat = group["d_coef"] * numerator / denominator
        first = torch.where(d == d0, torch.maximum(d, d_hat), d)
        d_max = torch.maximum(group["d_max"], d_hat)
        grown = torch.minimum(d_max, first * group["growth_rate"])
        moved = denominator > 0  # all gradients so far are zero otherwise, and there is nothing to learn from them
        values = {
            "d": torch.where(moved, grown, d),
            "d_max": torch.where(moved, d_max, group["d_max"]),
            "d_numerator": numerator,
            "d_denom": denominator,
            "d_hat": torch.where(moved, d_hat, d),
        }
        for other in self.param_groups:
            other.update(values)
            other["k"] += 1
