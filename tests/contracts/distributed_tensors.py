"""Checks with DTensor placements of tensor parallelism, given by hand and by ``parallelize_module``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import Parameter

from tests.bits import same_bits
from tests.contracts.distributed_models import assert_same, follow, like, whole
from tests.contracts.distributed_worker import World, check
from tests.models import everything, generator
from tests.specs import Spec

SHAPES = ((7, 5), (2, 4), (1, 9), (5, 2, 3))


def _full(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).bfloat16()


@check(1, 2, 3, smoke=True)
def every_placement_gives_the_bits_of_one_process(world: World, spec: Spec) -> None:
    """Including shards of unequal sizes and empty ones."""
    for shape, placement in itertools.product(SHAPES, (Shard(0), Shard(1), Replicate())):
        p = Parameter(distribute_tensor(_full(shape, 0), world.mesh, [placement]))
        q = Parameter(_full(shape, 0))
        opt, reference = spec.make([("w", p)]), spec.make([("w", q)])
        for step in range(1, 4):
            p.grad = distribute_tensor(_full(shape, step), world.mesh, [placement])
            q.grad = _full(shape, step)
            opt.step()
            reference.step()
        for a, b in zip(everything(opt, [p]), everything(reference, [q]), strict=True):
            assert same_bits(whole(a), b), (shape, placement)


@check(2, 3)
def a_gradient_with_another_placement_is_brought_to_the_parameters(world: World, spec: Spec) -> None:
    """A Partial gradient is the sum over processes; torch's own optimizers reduce it in their first operation."""
    shape = (7, 5)
    places = (Shard(0), Shard(1), Replicate())
    for placement, given in itertools.product(places, (Partial(), *places)):
        for one_by_one in (False, True):
            p = Parameter(distribute_tensor(_full(shape, 0), world.mesh, [placement]))
            q = Parameter(_full(shape, 0))
            opt, reference = spec.make([("w", p)]), spec.make([("w", q)])
            for step in range(1, 4):
                if given == Partial():
                    # Multiples of 1/8 up to 4: their sum is exact in bf16, in any order.
                    parts = [(_full(shape, 10 * step + r).clamp(-1, 1) * 8).round() / 8 for r in range(world.size)]
                    p.grad = DTensor.from_local(parts[world.rank], world.mesh, [Partial()])
                    q.grad = torch.stack(parts).float().sum(0).bfloat16()
                else:
                    p.grad = distribute_tensor(_full(shape, step), world.mesh, [given])
                    q.grad = _full(shape, step)
                if one_by_one:
                    opt.step_parameter(p, opt.param_groups[0], 0)
                else:
                    opt.step()
                reference.step()
                assert p.grad.placements == (given,)
            for a, b in zip(everything(opt, [p]), everything(reference, [q]), strict=True):
                assert same_bits(whole(a), b), (placement, given)


@check(2)
def what_is_not_sharded_alike_is_refused(world: World, spec: Spec) -> None:
    """A plain gradient or state under a sharded parameter, a gradient of another mesh, a state placed otherwise."""

    def fresh() -> tuple[Parameter, Any]:
        p = Parameter(distribute_tensor(_full((4, 6), 0), world.mesh, [Shard(0)]))
        p.grad = distribute_tensor(_full((4, 6), 1), world.mesh, [Shard(0)])
        return p, spec.make([("w", p)])

    def refused(p: Parameter, opt: Any, error: type[Exception], match: str) -> None:
        before = [t.clone() for t in everything(opt, [p])]
        with pytest.raises(error, match=match):
            opt.step()
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(everything(opt, [p]), before, strict=True))

    p, opt = fresh()
    p.data.grad_dtype = None
    other = init_device_mesh("cpu", (world.size, 1))
    p.grad = distribute_tensor(_full((4, 6), 1), other, [Shard(0), Replicate()])
    refused(p, opt, ValueError, "mesh")

    names = [state.name for state in spec.make([("w", Parameter(_full((4, 6), 0)))]).states(opt.param_groups[0], p)]
    if not names:
        return
    for wrong in (_full((4, 6), 0), distribute_tensor(_full((4, 6), 0), world.mesh, [Shard(1)])):
        p, opt = fresh()
        opt.step()
        if opt.state[p][names[0]].shape == p.shape:
            opt.state[p][names[0]] = wrong
            refused(p, opt, ValueError, names[0])


class Block(torch.nn.Module):
    """A norm with replicated weights and a pair of layers that are split by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 6)
        g = generator(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def _parallel(mesh: Any) -> torch.nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block(), mesh, plan)


@check(2, 3)
def tensor_parallel_layers_give_the_bits_of_one_process(world: World, spec: Spec) -> None:
    """A real backward: the norm works on its part of the sequence, so its gradients are Partial."""
    net, reference = _parallel(world.mesh), Block()
    opt, reference_opt = spec.make(net.named_parameters()), spec.make(reference.named_parameters())
    placements: set[Any] = set()

    def gradients(step: int) -> None:
        net.zero_grad()
        x = torch.randn(2, 6, 6, generator=generator(step)).bfloat16()
        part = distribute_tensor(x, world.mesh, [Shard(1)])
        out = net(part)
        out = out.to_local() if isinstance(out, DTensor) else out
        out.float().square().sum().backward()
        placements.update(p.grad.placements for p in net.parameters())

    follow(net, opt, reference, reference_opt, gradients, range(3))
    assert_same(net, opt, reference, reference_opt)
    assert (Partial(),) in placements
    assert (Shard(0),) in placements


@check(2, 4)
def fsdp_over_tensor_parallel_layers(world: World, spec: Spec) -> None:
    """Both shard dimension 0 of one weight: tensor parallelism first, then FSDP within each part."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("data", "tensor"))
    net, reference = _parallel(mesh["tensor"]), Block()
    fully_shard(net, mesh=mesh["data"])
    opt, reference_opt = spec.make(net.named_parameters()), spec.make(reference.named_parameters())

    def gradients(step: int) -> None:
        for i, p in enumerate(net.parameters()):
            p.grad = like(p, _full(tuple(p.shape), 10 * step + i))

    follow(net, opt, reference, reference_opt, gradients, range(3))
    assert_same(net, opt, reference, reference_opt)
