"""The base class: parameter groups, state, the step. Subclasses give a rule and its scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from subulp.backends import registry
from subulp.backends.job import Job
from subulp.numerics.noise import stream_of_name
from subulp.numerics.views import flat_views
from subulp.options import (
    COMMON_CHECKS,
    DEFAULTS,
    Check,
    normal_state_dtype,
    reject_unknown,
    state_dtype_of,
)
from subulp.rules.rule import Rule, State
from subulp.torch_internals import is_dtensor

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

PARAM_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


class Optimizer(torch.optim.Optimizer):
    """Base of every subulp optimizer.

    A subclass names its hyper-parameters with their checks, returns a :class:`~subulp.rules.rule.Rule` for a group and
    the rule's scalars (computed in fp64, used in fp32) for a group and a step. Everything else is here: all tensors of
    a step are checked before the first one changes; each written tensor is rounded once; the noise of an element is a
    function of (seed, stream, step, slot, global index) alone, see docs/noise.md.
    """

    hyperparameters: ClassVar[dict[str, Check]] = {}

    def __init__(self, params: Params, defaults: dict[str, Any], options: Any) -> None:
        reject_unknown(f"{type(self).__name__}()", options, {**defaults, **DEFAULTS})
        defaults = {**defaults, **DEFAULTS, **options}
        self._check(defaults, "")
        super().__init__(params, defaults)  # type: ignore[arg-type]

    # What a subclass defines

    def rule(self, group: dict[str, Any]) -> Rule:
        """The elementwise update of this group."""
        raise NotImplementedError

    def scalars(self, group: dict[str, Any], step: float) -> tuple[float, ...]:
        """The rule's scalar arguments at ``step`` (1 for the first update)."""
        raise NotImplementedError

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; its hyper-parameters and dtypes are checked first, and nothing changes on error."""
        groups = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[groups], f" (param group {groups})")
        except Exception:
            del self.param_groups[groups:]
            raise

    def _check(self, group: dict[str, Any], where: str) -> None:
        """Raises if a hyper-parameter breaks its rule; brings the options to their normal form."""
        try:
            for key, check in (COMMON_CHECKS | self.hyperparameters).items():
                if key in group:
                    checked = check(key, group[key])
                    if checked is not group[key]:
                        group[key] = checked
            names = [state.name for state in self.rule(group).states]
            group["state_dtype"] = normal_state_dtype("state_dtype", group["state_dtype"], names)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{error}{where}") from None
        for p in group.get("params", ()):
            if p.requires_grad:
                _check_param(p, where)

    # State

    def init_state(self) -> None:
        """Makes the state of every trainable parameter now (it is otherwise made at the parameter's first gradient)."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p, group)

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        if "step" not in state:
            device = p.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for spec in self.rule(group).states:
            if spec.name not in state:
                state[spec.name] = torch.zeros_like(p, dtype=_storage_dtype(p, spec, group))
        if "stream" not in state:
            state["stream"] = self._stream(p)
        return state

    def _stream(self, p: Tensor) -> int:
        """The noise stream of a parameter: a hash of its name if groups carry names, else its position."""
        position = 0
        seen: set[int] = set()
        for group in self.param_groups:
            names = group.get("param_names")
            for i, q in enumerate(group["params"]):
                stream = stream_of_name(names[i]) if names else position
                while stream in seen:  # names that differ only in wrapper prefixes
                    stream += 1
                if q is p:
                    return stream
                seen.add(stream)
                position += 1
        raise ValueError("The parameter is in none of this optimizer's groups: add it with add_param_group().")

    # Steps

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        ``closure``, if given, is called first, with gradients enabled, and its value returned. Nothing changes if any
        group, gradient or state is invalid: the error names it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update([(i, group, group["params"]) for i, group in enumerate(self.param_groups)])
        return loss

    def step_parameter(self, p: Tensor, group: dict[str, Any], i: int | None = None) -> None:
        """Updates one parameter of ``group``, with the bits that :meth:`step` would give it.

        For fused backward: call it from a post-accumulate-grad hook, on any thread, and free the gradient afterwards
        (it is not touched here). A parameter without gradient is left alone. ``i`` is accepted and not needed.
        """
        with torch.no_grad():
            self._update([(None, group, (p,))])

    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """:meth:`step_parameter` under the name that other trainers use; finds the group if none is given."""
        if group is None:
            group = next((g for g in self.param_groups if any(q is p for q in g["params"])), None)
            if group is None:
                raise ValueError("The parameter is in none of this optimizer's groups: add it with add_param_group().")
        self.step_parameter(p, group)

    supports_fused_back_pass: ClassVar[bool] = True
    """Read by trainers before they call :meth:`step_parameter` in backward hooks."""

    def _update(self, work: Sequence[tuple[int | None, dict[str, Any], Sequence[Tensor]]]) -> None:
        for i, group, params in work:
            where = "" if i is None else f" (param group {i})"
            self._check(group, where)
            for p in params:
                if p.grad is not None:
                    _check_param(p, where)
                    _check_grad(p, group, where)
                    self._check_state(p, group, where)
        for _, group, params in work:
            active = [p for p in params if p.grad is not None]
            if active:
                self._update_group(group, active)

    def _update_group(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        rule = self.rule(group)
        buckets: dict[Any, list[Job]] = {}
        scalars: dict[float, tuple[float, ...]] = {}
        for p in params:
            state = self._state_of(p, group)
            state["step"] += 1
            step = float(state["step"])
            if step not in scalars:
                scalars[step] = self.scalars(group, step)
            written = [p, *(self._state_tensor(state, spec.name, p) for spec in rule.states)]
            if group["differentiable"]:
                _record_update(rule, written, p.grad, scalars[step], group["maximize"])
                continue
            views = flat_views(written, [p.grad])  # type: ignore[list-item]
            if views.written[0].numel() == 0:
                continue
            key = (p.device, *(t.dtype for t in (*views.written, *views.reads)))
            buckets.setdefault(key, []).append(Job(views, state["stream"], int(step), scalars[step]))
        for key, jobs in buckets.items():
            registry.choose(group["backend"], key[0], key[1:]).run(
                rule,
                jobs,
                seed=group["seed"],
                stochastic=group["stochastic_rounding"],
                grad_factor=-1.0 if group["maximize"] else 1.0,
            )

    def _state_tensor(self, state: dict[str, Any], name: str, p: Tensor) -> Tensor:
        """The state tensor, on the parameter's device: trainers that offload layers move parameters between steps."""
        t: Tensor = state[name]
        if t.device != p.device:
            state[name] = t = t.to(p.device)
        return t

    def _check_state(self, p: Tensor, group: dict[str, Any], where: str) -> None:
        state = self.state.get(p)
        if not state:
            return
        for spec in self.rule(group).states:
            t = state.get(spec.name)
            if t is not None and (not isinstance(t, Tensor) or t.shape != p.shape):
                found = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
                raise ValueError(
                    f"state {spec.name!r} is {found} but its parameter has shape {tuple(p.shape)}{where}: "
                    "load the checkpoint that belongs to this model, or delete the state."
                )


def _storage_dtype(p: Tensor, spec: State, group: dict[str, Any]) -> torch.dtype:
    return p.dtype if p.is_complex() else state_dtype_of(group["state_dtype"], spec.name, spec.squared, p.dtype)


def _check_param(p: Tensor, where: str) -> None:
    if p.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"A parameter of shape {tuple(p.shape)} is {p.dtype}{where}: subulp trains bfloat16, float16, float32, float64 "
            "and complex parameters. Keep it in bfloat16, or freeze it with requires_grad_(False)."
        )


def _check_grad(p: Tensor, group: dict[str, Any], where: str) -> None:
    grad = p.grad
    assert_shape = f"The gradient of a parameter of shape {tuple(p.shape)}"
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{assert_shape} is sparse ({grad.layout}){where}: sparse gradients are not supported; use sparse=False in the "
            "embedding, or torch.optim.SparseAdam for it."
        )
    if grad.shape != p.shape:
        raise ValueError(f"{assert_shape} has shape {tuple(grad.shape)}{where}: they must be equal.")
    if grad.device != p.device:
        raise RuntimeError(
            f"{assert_shape} is on {grad.device}, the parameter on {p.device}{where}: move one to the other's device."
        )
    if grad.is_complex() != p.is_complex():
        raise TypeError(f"{assert_shape} is {grad.dtype}, the parameter {p.dtype}{where}: both or neither must be complex.")
    if is_dtensor(grad) != is_dtensor(p):
        raise TypeError(f"{assert_shape} is a {type(grad).__name__}, the parameter a {type(p).__name__}{where}: shard both.")
    if group["differentiable"] and (p.dtype in (torch.bfloat16, torch.float16) or is_dtensor(p)):
        raise ValueError(f"differentiable=True with a {p.dtype} parameter{where}: rounding has no gradient; use float32.")


def _record_update(
    rule: Rule, written: Sequence[Tensor], grad: Tensor | None, scalars: tuple[float, ...], maximize: bool
) -> None:
    """The update as autograd sees it: the formula on the tensors themselves."""
    if grad is None:
        return
    with torch.enable_grad():
        old = [torch.view_as_real(t) if t.is_complex() else t for t in (*written, -grad if maximize else grad)]
        target, *states, g = old
        for t, value in zip(old, rule.formula(target, g, *states, *scalars), strict=False):
            t.copy_(value)
