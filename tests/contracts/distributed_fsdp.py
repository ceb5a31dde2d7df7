"""Checks with FSDP2 (``fully_shard``): uneven and empty shards, mixed precision, the bits of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.bits import same_bits
from tests.contracts.distributed_models import (
    Net,
    assert_same,
    backward,
    copy_grads,
    follow,
    give_grads,
    reference_for,
    whole,
)
from tests.contracts.distributed_worker import World, check
from tests.specs import Spec


def shard(net: Net, mesh: Any, **options: Any) -> Net:
    """The network with each layer and the rest in FSDP units of their own."""
    for module in (net.wide, net.first, net.second, net):
        fully_shard(module, mesh=mesh, **options)
    return net


@check(1, 2, 3, smoke=True)
def fsdp_gives_the_bits_of_one_process(world: World, spec: Spec) -> None:
    """With a real backward; the reference takes the gradients that the reduction gave."""
    torch.manual_seed(world.rank)
    for named in (True, False):
        net = shard(Net(), world.mesh)
        opt = spec.make(net.named_parameters() if named else net.parameters())
        reference = Net()
        reference_opt = spec.make(reference.named_parameters() if named else reference.parameters())
        follow(net, opt, reference, reference_opt, lambda step, net=net: backward(net, world, step), range(4))
        assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_gives_the_bits_of_one_process_for_every_variant(world: World, spec: Spec) -> None:
    options: list[dict[str, Any]] = [
        *({k: v for k, v in variant.items() if k != "slice_p"} for variant in spec.variants),  # refused where sharded
        {"state_dtype": "fp32"},
        {"stochastic_rounding": False},
        {"backend": "eager"},
        {"lr": torch.tensor(1e-2)},
    ]
    for chosen in options:
        net = shard(Net(), world.mesh)
        opt = spec.make(net.named_parameters(), **chosen)
        reference, reference_opt = reference_for(spec, **chosen)
        follow(net, opt, reference, reference_opt, lambda step, net=net: give_grads(net, step), range(3))
        assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_with_other_dtypes(world: World, spec: Spec) -> None:
    for dtype in (torch.float32, torch.float16):
        net = shard(Net(dtype), world.mesh)
        opt = spec.make(net.named_parameters())
        reference, reference_opt = reference_for(spec, dtype)
        follow(net, opt, reference, reference_opt, lambda step, net=net: give_grads(net, step), range(3))
        assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_with_a_mixed_precision_policy(world: World, spec: Spec) -> None:
    """FSDP casts the reduced gradient back to the stored dtype, so that fp32 reduction under bf16 weights gives bf16."""
    for stored, policy in (
        (torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    ):
        net = shard(Net(stored), world.mesh, mp_policy=policy)
        opt = spec.make(net.named_parameters())
        reference, reference_opt = reference_for(spec, stored)
        follow(net, opt, reference, reference_opt, lambda step, net=net: backward(net, world, step), range(3))
        assert all(p.grad.dtype == stored for p in net.parameters())
        assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_with_gradients_of_another_dtype(world: World, spec: Spec) -> None:
    net = shard(Net(), world.mesh)
    opt = spec.make(net.named_parameters(), backend="eager")
    reference, reference_opt = reference_for(spec, backend="eager")
    for p in net.parameters():
        p.grad_dtype = None

    def gradients(step: int) -> None:
        give_grads(net, step)
        for p in net.parameters():
            p.grad = p.grad.float() * 1.001

    for p in reference.parameters():
        p.grad_dtype = None
    follow(net, opt, reference, reference_opt, gradients, range(3))
    assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_sharded_along_the_second_dimension(world: World, spec: Spec) -> None:
    """FSDP wants equal parts there, so one matrix has 12 columns."""
    weight = torch.linspace(-2, 2, 60).view(5, 12).bfloat16()
    net, reference = (torch.nn.Linear(12, 5, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for module in (net, reference):
        module.weight.data = weight.clone()
    fully_shard(net, mesh=world.mesh, shard_placement_fn=lambda p: Shard(1))
    opt, reference_opt = spec.make(net.named_parameters()), spec.make(reference.named_parameters())
    follow(net, opt, reference, reference_opt, lambda step: give_grads(net, step), range(3))
    assert opt.state[net.weight]["step"] == 3
    gradient: Any = net.weight.grad
    assert gradient.to_local().shape == (5, 12 // world.size)
    assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_parameters_stepped_one_by_one(world: World, spec: Spec) -> None:
    net = shard(Net(), world.mesh)
    opt = spec.make(net.named_parameters())
    reference, reference_opt = reference_for(spec)
    for step in range(3):
        give_grads(net, step)
        copy_grads(net, reference)
        for i, p in reversed(list(enumerate(net.parameters()))):
            opt.step_parameter(p, opt.param_groups[0], i)
            p.grad = None
        reference_opt.step()
    assert_same(net, opt, reference, reference_opt)


@check(2, 3)
def fsdp_with_frozen_idle_and_unsharded_parameters(world: World, spec: Spec) -> None:
    """In one group: a frozen one, one whose gradient comes late, and one that FSDP was told to leave alone."""
    net, reference = Net(), Net()
    for module in (net, reference):
        module.first.weight.requires_grad_(False)
    ignored = {net.table}
    for layer in (net.wide, net.first, net.second):
        fully_shard(layer, mesh=world.mesh)
    fully_shard(net, mesh=world.mesh, ignored_params=ignored)
    opt, reference_opt = spec.make(net.named_parameters()), spec.make(reference.named_parameters())

    def gradients(step: int) -> None:
        give_grads(net, step)
        net.first.weight.grad = None
        if step < 2:
            net.wide.bias.grad = None

    follow(net, opt, reference, reference_opt, gradients, range(4))
    assert_same(net, opt, reference, reference_opt)
    assert net.first.weight not in opt.state
    assert opt.state[net.wide.bias]["step"] == 2
    assert opt.backend_report()


@check(2)
def fsdp_with_a_scaler_skips_on_every_process(world: World, spec: Spec) -> None:
    """The overflow is in one element, which one process holds."""
    for scaling in (False, True):
        net = shard(Net(torch.float32), world.mesh)
        opt = spec.make(net.named_parameters())
        opt.amp_scaling = scaling
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        give_grads(net, 0)
        gradient: Any = net.wide.weight.grad
        gradient.to_local().view(-1)[0] = torch.inf if world.rank == 1 else 1.0
        before = [whole(p).clone() for p in net.parameters()]
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(same_bits(whole(p), q) for p, q in zip(net.parameters(), before, strict=True)), scaling


@check(2, 4)
def fsdp_in_two_dimensions(world: World, spec: Spec) -> None:
    """Replicas of shards (hybrid sharding): copies on two processes stay equal, and equal to one process."""
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    net = shard(Net(), mesh)
    opt = spec.make(net.named_parameters())
    reference, reference_opt = reference_for(spec)
    follow(net, opt, reference, reference_opt, lambda step: backward(net, world, step), range(3))
    assert_same(net, opt, reference, reference_opt)
