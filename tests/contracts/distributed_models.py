"""A small network, sharded and whole, trained side by side on the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import subulp
from tests.bits import same_bits
from tests.contracts.distributed_worker import World
from tests.models import generator
from tests.specs import Spec

Optimizer = subulp.optimizer.Optimizer


class Net(nn.Module):
    """First dimensions 33, 7, 2, 1 and 5: uneven for two and for three processes, and too short for some."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.wide = nn.Linear(17, 33)
        self.first = nn.Linear(33, 7)
        self.second = nn.Linear(7, 2)
        self.gain = nn.Parameter(torch.ones(1))
        self.table = nn.Parameter(torch.zeros(5, 2, 3))
        g = generator(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(torch.tanh(self.wide(x))))) * self.gain
        return y.float().square().mean() + (x[:, :5, None, None] * self.table).float().sum()


def whole(t: Any) -> Tensor:
    """The tensor with the parts of all processes."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


def backward(net: nn.Module, world: World, step: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """New gradients, from data that differ between the processes."""
    net.zero_grad()
    x = torch.randn(3, 17, generator=generator(100 * step + world.rank))
    net(x.to(dtype)).backward()


def give_grads(net: nn.Module, step: int) -> None:
    """Random gradients, equal for any sharding of the same network."""
    g = generator(500 + step)
    for p in net.parameters():
        full = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = like(p, full)


def like(p: Any, full: Tensor) -> Tensor:
    """This process's part of a tensor that all processes know whole, sharded as ``p`` is."""
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else full


def copy_grads(source: nn.Module, target: nn.Module) -> None:
    """The whole gradients of one network as gradients of the other."""
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        q.grad = None if p.grad is None else whole(p.grad).clone()


def follow(
    net: nn.Module,
    opt: Any,
    reference: nn.Module,
    reference_opt: Any,
    gradients: Callable[[int], None],
    steps: range,
) -> None:
    """Steps both optimizers on the gradients that ``gradients(step)`` gives to ``net``."""
    for step in steps:
        gradients(step)
        copy_grads(net, reference)
        opt.step()
        reference_opt.step()


def assert_same(net: nn.Module, opt: Any, reference: nn.Module, reference_opt: Any) -> None:
    """Equal bits of all parameters and states, and states that are sharded as their parameters."""
    wrong = []
    for (name, p), (_, q) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        if not same_bits(whole(p), whole(q)):
            wrong.append(name)
        ours, theirs = opt.state.get(p, {}), reference_opt.state.get(q, {})
        if set(ours) != set(theirs):
            wrong.append(f"{name}: states {sorted(ours)} and {sorted(theirs)}")
            continue
        for state, t in ours.items():
            other = theirs[state]
            same = same_bits(whole(t), whole(other)) if isinstance(t, Tensor) else t == other
            if not same:
                wrong.append(f"{name}.{state}")
            if isinstance(p, DTensor) and isinstance(t, Tensor) and t.shape == p.shape and t.dim() > 0:
                assert isinstance(t, DTensor)
                assert t.placements == p.placements
    assert not wrong, wrong


def assert_replicas_equal(world: World, tensors: list[Tensor]) -> None:
    """Equal bits on every process."""
    for t in tensors:
        copies = [torch.empty_like(t) for _ in range(world.size)]
        torch.distributed.all_gather(copies, t.detach().contiguous())
        assert all(same_bits(copy, t) for copy in copies)


def reference_for(spec: Spec, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Net, Optimizer]:
    """The whole network on one process, and its optimizer."""
    net = Net(dtype)
    return net, spec.make(net.named_parameters(), **options)
