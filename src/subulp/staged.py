"""Optimizers that need sums or products over a whole parameter before its elementwise update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from subulp.backends import registry
from subulp.batch import Batch
from subulp.checks import check_grad, check_param, check_state
from subulp.optimizer import Optimizer
from subulp.passes import Kind, Passes
from subulp.sharding import placed_like
from subulp.torch_internals import is_dtensor, local_tensor

TOGETHER = 1 << 24
"""Elements of the parameters that go through the passes together (or one parameter): sums take an eighth of a byte each."""


class StagedOptimizer(Optimizer):
    """Base of optimizers whose update is not elementwise: passes over all parameters of a kind, see :class:`Passes`.

    Sums are accumulated in fp64, in one order on every backend (``subulp.formula.sums``). Where a parameter is sharded, each
    process sums its part and the parts are added, so two layouts give the same fp32 number unless the sum lies within about
    n * 2**-53 of the middle between two of them, about once in 2**28 numbers.
    """

    def update(self, passes: Passes) -> None:
        """Updates parameters of one kind: of equal dtypes and sharding, with two dimensions or more or with fewer."""
        raise NotImplementedError

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise NotImplementedError(
                    f"{option}=True{where}: {type(self).__name__} has no such mode; leave it False."
                )

    def _kind(self, group: dict[str, Any]) -> Any:
        return id(group)

    def _prepared(self, batch: Batch) -> Callable[[], None]:
        plan = self._plans.get(batch.key)
        states = [self.state.get(p) or {} for p in batch.params]
        if plan is None or not plan.fits(batch, states):
            self._check_all(batch, states)
            plan = None
        return partial(self._update_in_passes, batch, plan)

    def _check_all(self, batch: Batch, states: Sequence[dict[str, Any]]) -> None:
        for p, grad, state, where in zip(batch.params, batch.grads, states, batch.where(), strict=True):
            check_param(p, where)
            if p.is_complex():
                raise RuntimeError(f"A parameter is {p.dtype}{where}: {type(self).__name__} trains real parameters.")
            check_grad(p, grad, False, where)
            specs = {s: state[s.name] for s in self.states(batch.group, p) if s.name in state}
            check_state(p, specs, where)

    def _update_in_passes(self, batch: Batch, plan: StagePlan | None) -> None:
        if self._overflowed():
            return
        batch.grads = placed_like(batch.grads, batch.params)
        if plan is None:
            counts = self._counting(batch)
            if counts is not None:
                batch.keep(counts)
            states = [self._state_of(p, batch.group) for p in batch.params]
            plan = StagePlan(batch, states)
            if counts is None:
                self._plans[batch.key] = plan
        else:
            states = [self.state[p] for p in batch.params]
        steps = registry.advance([state["step"] for state in states])
        factor = self._read_factor(batch.group)
        for kind, chosen in plan.kinds:
            params, grads = ([column[i] for i in chosen] for column in (batch.params, batch.grads))
            own = [states[i] for i in chosen]
            self.update(Passes(kind, batch.group, params, grads, own, steps[chosen], factor))


class StagePlan:
    """The kinds of a batch's parameters, for as long as these, their states and their gradients stay what they are."""

    def __init__(self, batch: Batch, states: Sequence[dict[str, Any]]) -> None:
        self._seen = _identity(batch, states)
        members: dict[Any, list[list[int]]] = {}
        sizes: dict[Any, int] = {}
        for i, (p, grad, state) in enumerate(zip(batch.params, batch.grads, states, strict=True)):
            if p.numel() > 0 and not p.is_meta:
                kind = _kind_of(p, grad, state)
                # By the whole parameter's size, so that all processes cut alike.
                sizes[kind] = sizes.get(kind, TOGETHER) + p.numel()
                if sizes[kind] > TOGETHER:
                    sizes[kind] = p.numel()
                    members.setdefault(kind, []).append([])
                members[kind][-1].append(i)
        self.kinds = [
            (Kind([batch.params[i] for i in chosen], [states[i] for i in chosen]), chosen)
            for batches in members.values()
            for chosen in batches
        ]

    def fits(self, batch: Batch, states: Sequence[dict[str, Any]]) -> bool:
        return all(states) and _identity(batch, states) == self._seen


def _identity(batch: Batch, states: Sequence[dict[str, Any]]) -> list[Any]:
    """Equal where every tensor is the one it was, and has the type, dtype, shape and device it had."""
    tensors = list(chain.from_iterable(state.values() for state in states))
    every = [t for t in chain(batch.params, batch.grads, tensors) if isinstance(t, Tensor)]
    return [
        list(map(id, chain(batch.params, tensors))),
        list(map(type, batch.grads)),
        [g.layout for g in batch.grads],
        [t.dtype for t in every],
        [t.shape for t in every],
        [t.device for t in every],
    ]


def _kind_of(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    """Equal for parameters that one pass can take together."""
    sharded: Any = p
    spread = (sharded.device_mesh, tuple(sharded.placements)) if is_dtensor(p) else None
    dtypes = [(name, value.dtype) for name, value in state.items() if isinstance(value, Tensor)]
    dims = p.dim() if spread is not None else min(p.dim(), 2)
    return local_tensor(p).device, p.dtype, grad.dtype, tuple(sorted(dtypes, key=str)), spread, dims
