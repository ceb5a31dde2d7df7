"""Optimizers that need sums or products over a whole parameter before its elementwise update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from subulp.backends import registry
from subulp.batch import Batch
from subulp.checks import check_grad, check_param, check_state
from subulp.optimizer import Optimizer
from subulp.passes import Passes
from subulp.sharding import placed_like
from subulp.torch_internals import is_dtensor, local_tensor


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
        group = batch.group
        for p, grad, where in zip(batch.params, batch.grads, batch.where(), strict=True):
            check_param(p, where)
            if p.is_complex():
                raise RuntimeError(f"A parameter is {p.dtype}{where}: {type(self).__name__} trains real parameters.")
            check_grad(p, grad, False, where)
            state = self.state.get(p) or {}
            check_state(p, {s: state[s.name] for s in self.states(group, p) if s.name in state}, where)
        return partial(self._update_in_stages, batch)

    def _update_in_stages(self, batch: Batch) -> None:
        if self._overflowed():
            return
        batch.grads = placed_like(batch.grads, batch.params)
        counts = self._counting(batch)
        if counts is not None:
            batch.keep(counts)
        group = batch.group
        states = [self._state_of(p, group) for p in batch.params]
        steps = registry.advance([state["step"] for state in states])
        factor = self._read_factor(group)
        kinds: dict[Any, list[int]] = {}
        for i, (p, grad, state) in enumerate(zip(batch.params, batch.grads, states, strict=True)):
            if p.numel() > 0 and not p.is_meta:
                kinds.setdefault(self._kind_of(p, grad, state), []).append(i)
        for chosen in kinds.values():
            members = ([column[i] for i in chosen] for column in (batch.params, batch.grads, states))
            self.update(Passes(group, *members, steps[chosen], factor))

    @staticmethod
    def _kind_of(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
        """Equal for parameters that one pass can take together."""
        sharded: Any = p
        spread = (sharded.device_mesh, tuple(sharded.placements)) if is_dtensor(p) else None
        dtypes = [(name, value.dtype) for name, value in state.items() if isinstance(value, Tensor)]
        dims = p.dim() if spread is not None else min(p.dim(), 2)
        return local_tensor(p).device, p.dtype, grad.dtype, tuple(sorted(dtypes, key=str)), spread, dims
