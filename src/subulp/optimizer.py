"""The base class: parameter groups, state, the step. Subclasses give a rule and its scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import is_
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from subulp.backends import registry
from subulp.backends.bucket import make_buckets
from subulp.backends.device_steps import advance_on_device, fill_on_device
from subulp.backends.eager import record_update
from subulp.backends.forks import alone_after_fork
from subulp.backends.report import BucketReport, report_group
from subulp.batch import Batch, map_tensors
from subulp.checkpoint import check_form, pack, unpack
from subulp.checks import check_grad, check_param, check_state, is_plain
from subulp.formula.rule import Rule, State
from subulp.numerics import streams
from subulp.options import (
    COMMON_CHECKS,
    DEFAULTS,
    Check,
    as_real,
    normal_rounding,
    normal_state_dtype,
    reject_unknown,
    rounding_of,
    state_dtype_of,
    warn_of_misspelt,
)
from subulp.scaling import LossScaling, sign_of
from subulp.sharding import counter_device, is_zero, placed_like, zeros_for
from subulp.torch_internals import is_dtensor, mark_written, opaque_to_compile

_COMMON_TO_LAUNCH = ("stochastic_rounding", "backend", "seed", "maximize", "differentiable", "capturable")
_IMMUTABLE = frozenset((float, int, bool, str, tuple, type(None)))

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Optimizer(LossScaling, torch.optim.Optimizer):
    """Base of every subulp optimizer.

    A subclass names its hyper-parameters with their checks, returns a :class:`~subulp.formula.rule.Rule` for a group and
    the rule's scalars (computed in fp64, used in fp32) for a group and a step. Everything else is here: all tensors of
    a step are checked before the first one changes; each written tensor is rounded once; the noise of an element is a
    function of (seed, stream, step, slot, global index) alone, see docs/noise.md.
    """

    hyperparameters: ClassVar[dict[str, Check]] = {}
    run_state: ClassVar[frozenset[str]] = frozenset()
    """Group keys that the optimizer itself writes: they come from the checkpoint and never from settings."""

    own_settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that copies and pickles keep; torch keeps defaults, state and groups."""

    _checks: ClassVar[dict[str, Check]] = COMMON_CHECKS
    _watched: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._checks = COMMON_CHECKS | cls.hyperparameters
        cls._watched = (*cls._checks, "stochastic_rounding", "state_dtype")

    def __init__(self, params: Params, defaults: dict[str, Any], options: Any) -> None:
        reject_unknown(f"{type(self).__name__}()", options, {**defaults, **DEFAULTS})
        defaults = {**defaults, **DEFAULTS, **options}
        self._check(defaults, "")
        self._forget_plans()
        super().__init__(params, defaults)
        if self.defaults["stream"] is None and "param_names" not in self.param_groups[0]:
            self.defaults["stream"] = streams.next_base("optimizer")
            for group in self.param_groups:
                if group["stream"] is None:
                    group["stream"] = self.defaults["stream"]

    @classmethod
    def __subclasses__(cls) -> list[type[Any]]:
        """The subclasses, in the place of a namesake of a torch.optim class its own ones.

        Command lines find optimizers by short names (jsonargparse, so Lightning's ``--optimizer AdamW``) among all subclasses
        of torch's and refuse a name that two have. Full paths do not go through here.
        """
        found: list[type[Any]] = []
        for kind in type.__subclasses__(cls):
            ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
            found += kind.__subclasses__() if ours and hasattr(torch.optim, kind.__name__) else [kind]
        return found

    # What a subclass defines

    def rule(self, group: dict[str, Any]) -> Rule:
        """The elementwise update of this group."""
        raise NotImplementedError

    def states(self, group: dict[str, Any], p: Tensor | None = None) -> tuple[State, ...]:
        """The state tensors of a parameter of this group, or (None) all that its parameters can have."""
        return self.rule(group).states

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        """The rule's scalar arguments at ``step`` (1 for the first update), by name.

        ``step`` and ``group["lr"]`` are floats or, with ``capturable``, fp64 tensors on the device: use arithmetic that
        serves both (``**`` instead of ``math.sqrt``), and convert neither.
        """
        raise NotImplementedError

    def _ordered_scalars(self, group: dict[str, Any], step: Any) -> tuple[Any, ...]:
        return self.rule(group).ordered(self.scalars(group, step))

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; its hyper-parameters and dtypes are checked first, and nothing changes on error."""
        groups = len(self.param_groups)
        warn_of_misspelt(param_group, {**self.defaults, **self._checks, "params": None}, f" (param group {groups})")
        super().add_param_group(param_group)
        self._streams.clear()
        try:
            self._check(self.param_groups[groups], f" (param group {groups})")
        except Exception:
            del self.param_groups[groups:]
            raise
        lr = self.param_groups[groups]["lr"]
        if isinstance(lr, Tensor) and any(group["lr"] is lr for group in self.param_groups[:groups]):
            # Schedulers write into it: each group needs its own (pytorch issue 126854).
            self.param_groups[groups]["lr"] = lr.clone()

    def _check(self, group: dict[str, Any], where: str) -> None:
        """Raises if a hyper-parameter breaks its rule; brings the options to their normal form."""
        try:
            for key, check in self._checks.items():
                if key in group:
                    checked = check(key, group[key])
                    if checked is not group[key]:
                        group[key] = checked
            states = self.states(group)
            free = [state.name for state in states if not (state.fp32 or state.own)]
            group["state_dtype"] = normal_state_dtype("state_dtype", group["state_dtype"], free)
            names = [state.name for state in states]
            group["stochastic_rounding"] = normal_rounding("stochastic_rounding", group["stochastic_rounding"], names)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{error}{where}") from None
        for p in group.get("params", ()):
            if p.requires_grad:
                check_param(p, where)

    def _recheck(self, group: dict[str, Any], where: str) -> bool:
        """:meth:`_check`, but only if a value is not the object that was checked last (or could change in place).

        Returns whether a hyper-parameter is a tensor. Kept short: it runs for every group at every step.
        """
        values = list(map(group.get, self._watched))
        last = self._last_checked.get(id(group))
        if last is not None and last.fixed and all(map(is_, values, last.values)):
            return last.tensors
        checked = {**group, "params": ()}
        self._check(checked, where)
        group.update((name, checked[name]) for name in self._watched if name in group)
        self._last_checked[id(group)] = _Checked(list(map(group.get, self._watched)))
        if last is not None and last.values[-1] != group["state_dtype"]:
            self._recast.append(group)
            self._plans.clear()  # they hold the addresses of the states as they are
        return self._last_checked[id(group)].tensors

    # State

    @torch.no_grad()
    def init_state(self) -> None:
        """Makes the state of every trainable parameter now (it is otherwise made at the parameter's first gradient)."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p, group)

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        step = state.get("step")
        device = counter_device(p, group)
        if step is None:
            state["step"] = torch.zeros((), dtype=torch.float64, device=device)
        elif step.dtype != torch.float64 or step.device != device:
            state["step"] = step.to(device, torch.float64)
        for spec in self.states(group, p):
            if spec.name not in state:
                with alone_after_fork():
                    state[spec.name] = zeros_for(p, spec, _storage_dtype(p, spec, group))
            elif state[spec.name].device != p.device:
                # Trainers that offload layers move parameters between steps.
                state[spec.name] = state[spec.name].to(p.device)
        if "stream" not in state:
            state["stream"] = torch.tensor(self._stream(p))
        elif not state["stream"].is_cpu:
            state["stream"] = state["stream"].cpu()
        return state

    def _stream(self, p: Tensor) -> int:
        """The noise stream of a parameter: docs/noise.md."""
        if p not in self._streams:
            kept = {q: int(state["stream"]) for q, state in self.state.items() if "stream" in state}
            self._streams.update(streams.assign(self.param_groups, kept))
        if p not in self._streams:
            raise ValueError("The parameter is in none of this optimizer's groups: add it with add_param_group().")
        return self._streams[p]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, here or in ``torch.optim``; every state keeps its bits.

        A state that is stored here in fewer bits than there (a torch checkpoint with fp32 moments) is rounded to nearest.
        Options that the checkpoint's groups lack are kept.

        Raises:
            ValueError: the checkpoint belongs to another model or holds an invalid value. The optimizer is as before.
        """
        check_form(state_dict)
        handle = self.register_load_state_dict_pre_hook(pack)  # the last one: after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_step_supports_amp_scaling", *self.own_settings)
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept if name in self.__dict__}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        unpack(self, _storage_dtype)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans: dict[int, Any] = {}
        self._last_checked: dict[int, _Checked] = {}
        self._recast: list[dict[str, Any]] = []
        self._streams: dict[Tensor, int] = {}

    def backend_report(self) -> list[BucketReport]:
        """Which backend serves which tensors, and why: one entry for each launch of a step. Print the entries."""
        reports = []
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.requires_grad]
            dtypes = []
            for p in params:
                state, specs = self.state.get(p, {}), self.states(group, p)
                dtypes.append([state[s.name].dtype if s.name in state else _storage_dtype(p, s, group) for s in specs])
            reports += report_group(number, group["backend"], params, dtypes)
        return reports

    # Steps

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @opaque_to_compile
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
            self.finish_step()
        return loss

    def finish_step(self) -> None:
        """Called at the end of every :meth:`step`, also of one that finds no gradients (after updates in backward)."""

    @opaque_to_compile
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
        updates = [self._prepared(batch) for batch in self._batches(work)]
        while self._recast:
            self._cast_states(self._recast.pop())
        for update in updates:
            update()

    def _batches(self, work: Sequence[tuple[int | None, dict[str, Any], Sequence[Tensor]]]) -> Iterable[Batch]:
        """The parameters with gradients, in batches of groups that take the same launches."""
        batches: dict[Any, Batch] = {}
        for number, group, params in work:
            where = "" if number is None else f" (param group {number})"
            tensors = self._recheck(group, where)
            grads = [p.grad for p in params]
            if any(grad is None for grad in grads):
                params = [p for p in params if p.grad is not None]
            active = [grad for grad in grads if grad is not None]
            if active:
                kind = self._kind(group)
                batch = batches.get(kind)
                if batch is None:
                    batch = batches[kind] = Batch(id(params[0]) if number is None else id(group))
                batch.add(group, params, active, where, tensors)
        return batches.values()

    def _kind(self, group: dict[str, Any]) -> Any:
        """Equal for groups whose parameters may share launches."""
        return self.rule(group), *(group[name] for name in _COMMON_TO_LAUNCH)

    def _prepared(self, batch: Batch) -> Callable[[], None]:
        """The update of a batch, checked and ready to run; raises, with nothing changed, if something is invalid."""
        states = [self.state.get(p) or {} for p in batch.params]
        plan = self._plans.get(batch.key)
        if plan is not None:
            columns = plan.gather(self.rule(batch.group), batch, states, _choices(batch.group))
            if columns is not None:
                return partial(self._run_plan, batch, columns, plan)
        simple = []
        for p, grad, state, group, where in zip(
            batch.params, batch.grads, states, batch.owners(), batch.where(), strict=True
        ):
            companions = {spec: state[spec.name] for spec in self.states(group) if spec.name in state}
            plain = not group["differentiable"] and is_plain(p, [grad, *companions.values()])
            if not plain:
                check_param(p, where)
                check_grad(p, grad, group["differentiable"], where)
                check_state(p, companions, where)
            simple.append(plain)
        return partial(self._update_batch, batch, simple)

    def _update_batch(self, batch: Batch, simple: list[bool]) -> None:
        group, rule = batch.group, self.rule(batch.group)
        rounding = rounding_of(group["stochastic_rounding"], rule.written)
        if not all(simple):
            batch.grads = placed_like(batch.grads, batch.params)
        counts = self._counting(batch)
        if counts is not None:
            batch.keep(counts)
            simple = list(compress(simple, counts))
        if not batch.params:
            return
        states = [self._state_of(p, own) for p, own in zip(batch.params, batch.owners(), strict=True)]
        columns = [batch.params, *([state[spec.name] for state in states] for spec in rule.states)]
        if all(simple):
            plan = registry.make_plan(rule, columns, batch, states, rounding, _choices(group))
            if plan is not None:
                self._plans[batch.key] = plan
                self._run_plan(batch, plan.columns(batch, states), plan)
                return
        counters = [state["step"] for state in states]
        if group["differentiable"]:
            self._record(rule, batch, columns, counters)
            return
        buckets = make_buckets(columns, [batch.grads], simple, [int(state["stream"]) for state in states])
        backends = [registry.choose(group["backend"], bucket.device, bucket.dtypes) for bucket in buckets]
        if group["capturable"] and all(backend.READS_DEVICE_STEPS for backend in backends):
            advance_on_device(counters, self._from_scaler("found_inf"))
            for bucket in buckets:
                fill_on_device(bucket, counters, batch.owners(), self._ordered_scalars)
        elif self._overflowed():
            return
        else:
            steps = registry.advance(counters)
            scalars = batch.scalar_rows(self._ordered_scalars, steps)
            for bucket in buckets:
                bucket.fill(steps, *scalars)
        for bucket, backend in zip(buckets, backends, strict=True):
            on_device = isinstance(bucket.steps, Tensor)
            backend.run(
                rule,
                bucket,
                seed=group["seed"],
                stochastic=rounding,
                read_factor=sign_of(group) if on_device else self._read_factor(group),
                **(self._amp_tensors(bucket.device) if on_device else {}),
            )
        mark_written(t for column in columns for t in column if is_dtensor(t))  # their local parts have been

    def _record(
        self, rule: Rule, batch: Batch, columns: Sequence[Sequence[Tensor]], counters: Sequence[Tensor]
    ) -> None:
        """The update as autograd sees it: also of hyper-parameters that are tensors."""
        if self._overflowed():
            return
        factor = self._read_factor(batch.group)
        with torch.enable_grad():
            for i, (group, step) in enumerate(zip(batch.owners(), registry.advance(counters), strict=True)):
                scalars = self._ordered_scalars(map_tensors(group, lambda t: t.view(())), float(step))
                record_update(rule, [column[i] for column in columns], batch.grads[i] * factor, scalars)

    def _cast_states(self, group: dict[str, Any]) -> None:
        """Brings the states of a group whose ``state_dtype`` has been edited to it, rounding to nearest."""
        for p in group["params"]:
            state = self.state.get(p) or {}
            for spec in self.states(group, p):
                if spec.name in state:
                    state[spec.name] = state[spec.name].to(_storage_dtype(p, spec, group))

    def _counting(self, batch: Batch) -> list[bool] | None:
        """Which parameters this step counts for; None: all of them.

        torch.distributed.checkpoint makes state by a step with lr=0 and zero gradients, and does not undo the count;
        counted, it would weaken the bias correction of every later step.
        """
        if all("step" in self.state[p] for p in batch.params):
            return None
        still = [group["lr"] is not None and as_real("lr", group["lr"]) == 0 for group in batch.groups]
        if not any(still):
            return None
        owners, paused = batch.owners(), np.repeat(still, batch.counts)
        counts = [
            not pause or bool(self.state[p]) or not is_zero(grad)
            for p, grad, pause in zip(batch.params, batch.grads, paused, strict=True)
        ]
        for p, group in zip(batch.params, owners, strict=True):
            self._state_of(p, group)
        return counts

    def _run_plan(self, batch: Batch, columns: list[Sequence[Tensor]], plan: Any) -> None:
        if not self._overflowed():
            group = batch.group
            plan.step(batch, columns, self._ordered_scalars, group["seed"], self._read_factor(group))


class _Checked:
    """The hyper-parameters of a group as they were when they passed."""

    __slots__ = ("fixed", "tensors", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.fixed = {type(value) for value in values} <= _IMMUTABLE
        inner = [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]
        self.tensors = any(isinstance(item, Tensor) for item in inner)
        self.fixed &= not self.tensors


def _choices(group: dict[str, Any]) -> tuple[bool | str, str]:
    return group["stochastic_rounding"], group["backend"]


def _storage_dtype(p: Tensor, spec: State, group: dict[str, Any]) -> torch.dtype:
    if spec.own:
        return p.dtype
    if spec.fp32:
        return torch.promote_types(p.dtype, torch.float32)
    return p.dtype if p.is_complex() else state_dtype_of(group["state_dtype"], spec.name, spec.squared, p.dtype)
