"""Optimizers that need sums or products over a whole parameter before its elementwise update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from subulp.backends import registry
from subulp.backends.bucket import single
from subulp.backends.sums import needs_no_temporaries, square_sum
from subulp.batch import Batch
from subulp.checks import check_grad, check_param, check_state
from subulp.formula.rule import Rule
from subulp.numerics.views import flat_views
from subulp.optimizer import Optimizer
from subulp.options import rounding_of
from subulp.sharding import placed_like, sum_over_shards
from subulp.torch_internals import global_block, local_tensor

BLOCK = {"cpu": 1 << 19}
"""Elements of a block: on a CPU its fp32 temporaries should stay in the cache."""

ACCELERATOR_BLOCK = 1 << 25
"""On other devices launches cost more than memory traffic."""


class Stages:
    """One parameter in one step: its part in this process, walked in blocks of rows, and its elementwise updates."""

    def __init__(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, factor: float
    ) -> None:
        self.p = p
        self.state = state
        self.stream = int(state["stream"])
        self.group = group
        self.step = step
        self.shape, self._offset = global_block(p)
        self.local = local_tensor(p)
        self.dtype = torch.promote_types(p.dtype, torch.float32)
        self.grad = local_tensor(grad)
        self.native = group["backend"] != "eager"
        self._factor = factor
        self._scratch: dict[str, Tensor] = {}

    def _rounding(self, rule: Rule) -> bool | tuple[bool, ...]:
        return rounding_of(self.group["stochastic_rounding"], rule.written)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, over all processes."""
        return prod(self.shape)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of the first dimension that cover the local part; (0, 1) for a scalar."""
        if self.local.numel() == 0:
            return
        rows = self.local.shape[0] if self.local.dim() > 0 else 1
        limit = BLOCK.get(self.local.device.type, ACCELERATOR_BLOCK)
        step = max(1, limit // (self.local.numel() // rows))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def ranges(self, *tensors: Tensor) -> Iterator[tuple[int, int]]:
        """:meth:`blocks` for sums over these local tensors: all rows at once where the sums need no temporaries."""
        if (
            self.native
            and self._factor == 1
            and self.local.dim() == 2
            and self.dtype == torch.float32
            and all(map(needs_no_temporaries, tensors))
        ):
            yield 0, self.local.shape[0]
        else:
            yield from self.blocks()

    def rows(self, t: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a tensor whose first dimension is the parameter's."""
        t = local_tensor(t)
        return t[start:stop] if t.dim() > 0 else t

    def gradient(self, start: int, stop: int) -> Tensor:
        """The gradient in fp32, times the factor of loss scaling and maximize. Not to be written to: it may be ``p.grad``."""
        block = self.rows(self.grad, start, stop).to(self.dtype)
        return block if self._factor == 1 else block * self._factor

    def stored_gradient(self, start: int, stop: int) -> Tensor:
        """:meth:`gradient`, but in the dtype that the gradient is stored in if there is no factor."""
        return self.rows(self.grad, start, stop) if self._factor == 1 else self.gradient(start, stop)

    def whole_gradient(self) -> Tensor:
        """:meth:`gradient` of all rows of this process."""
        rows = self.local.shape[0] if self.local.dim() > 0 else 1
        return self.gradient(0, rows)

    def scratch(self, name: str, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory for a block, the same for all blocks of a name: fresh pages cost more than the numbers."""
        numel = prod(shape)
        memory = self._scratch.get(name)
        if memory is None or memory.numel() < numel:
            memory = self._scratch[name] = torch.empty(numel, dtype=self.dtype, device=self.local.device)
        return memory[:numel].view(tuple(shape))

    def root_mean_square(self, part: Callable[[int, int], Tensor], *tensors: Tensor) -> Tensor:
        """Of all elements, over all processes, of a tensor that ``part`` gives in blocks: fp64, 0-d, on the device.

        ``tensors``, if given, are all that ``part`` reads, and it makes nothing of them: see :meth:`ranges`.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.local.device)
        for start, stop in self.ranges(*tensors) if tensors else self.blocks():
            total += square_sum(part(start, stop), self.native)
        return self.root_of_mean(total)

    def root_of_mean(self, total: Tensor) -> Tensor:
        """The square root of a sum over this process's elements, summed over processes and divided by all elements."""
        return (sum_over_shards(total, self.p) / self.numel).sqrt()

    def store(self, rule: Rule, reads: Mapping[str, Tensor], scalars: Mapping[str, Any], start: int, stop: int) -> None:
        """The elementwise update of a block; ``scalars`` are floats or 0-d tensors, ``reads`` are blocks."""
        written = [self.rows(t, start, stop) for t in (self.p, *(self.state[s.name] for s in rule.states))]
        offset = (self._offset[0] + start, *self._offset[1:]) if self._offset else ()
        views = flat_views(written, [reads[name] for name in rule.reads], block=(self.shape, offset))
        values = rule.ordered(scalars)
        bucket = single(views, self.stream, self.step, (0.0,) * len(values))
        backend = registry.choose(self.group["backend"], bucket.device, bucket.dtypes)
        if backend.READS_DEVICE_STEPS and any(isinstance(s, Tensor) for s in values):
            # Sums of a whole tensor stay on the device: the host does not wait for them.
            device = bucket.device
            tensors = [s if isinstance(s, Tensor) else torch.full((), s, device=device) for s in values]
            bucket.scalars = torch.stack([v.to(device, torch.float64) for v in tensors]).view(1, -1)
            bucket.steps = torch.full((1,), self.step, dtype=torch.int64, device=device)
        else:
            bucket.scalars[0, :] = [float(s) for s in values]
        backend.run(rule, bucket, seed=self.group["seed"], stochastic=self._rounding(rule))

    def apply(self, rule: Rule, factors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """The update of a rule that reads the gradient ``g``, and factors of shape (..., rows, 1) or (..., 1, columns)."""
        if self._apply_rows(rule, factors, scalars):
            return
        elementwise = rule.by_elements()
        for start, stop in self.blocks():
            g = self.gradient(start, stop)
            reads = {
                name: self.scratch(name, g.shape).copy_(factor_rows(t, start, stop)) for name, t in factors.items()
            }
            self.store(elementwise, {"g": g, **reads}, scalars, start, stop)

    def _apply_rows(self, rule: Rule, factors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> bool:
        """:meth:`apply` for a matrix on a CPU, without temporaries; False, and nothing done, where that cannot be."""
        written = [self.local, *(local_tensor(self.state[s.name]) for s in rule.states)]
        # What :meth:`store` would choose: there the gradient comes as fp32, whatever its dtype.
        dtypes = [*(t.dtype for t in written), self.dtype]
        if registry.choose(self.group["backend"], self.local.device, dtypes).NAME != "numba":
            return False
        from subulp.backends.numba import rows as numba_rows

        if not numba_rows.can_serve(written, [self.grad]):
            return False
        numba_rows.run(
            rule,
            written,
            [self.grad],
            {name: t.reshape(-1) for name, t in factors.items()},
            {name: float(value) for name, value in scalars.items()},
            columns=self.shape[1],
            offset=(self._offset[0], self._offset[1]),
            stream=self.stream,
            step=self.step,
            seed=self.group["seed"],
            stochastic=self._rounding(rule),
            factor=self._factor,
        )
        return True


def factor_rows(t: Tensor, start: int, stop: int) -> Tensor:
    """The rows ``start`` to ``stop`` of the first dimension of a factor; of a matrix's factors those by column have one."""
    return t[start:stop] if t.dim() > 2 or t.shape[-1] == 1 else t


class StagedOptimizer(Optimizer):
    """Base of optimizers whose update is not elementwise: stages in torch, then elementwise rules.

    One parameter is updated at a time, in blocks of rows, so that no temporary is as large as a parameter with many rows.
    Sums are accumulated in fp64 and rounded to fp32 once. Their order depends on blocks and shards, so two layouts give
    the same fp32 number unless the sum lies within about n * 2**-53 of the middle between two of them, about once in
    2**28 numbers.
    """

    def update(self, stages: Stages) -> None:
        """Updates one parameter."""
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
        self.update_all(
            [
                Stages(p, grad, state, group, int(step), factor)
                for p, grad, state, step in zip(batch.params, batch.grads, states, steps, strict=True)
                if p.numel() > 0 and not p.is_meta
            ]
        )

    def update_all(self, parameters: list[Stages]) -> None:
        """Updates the parameters of a group, one after the other."""
        for stages in parameters:
            self.update(stages)
