"""Checks with a whole copy of the parameters on each process: DDP and ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.contracts.distributed_models import (
    Net,
    assert_replicas_equal,
    assert_same,
    backward,
    copy_grads,
    follow,
    give_grads,
    reference_for,
)
from tests.contracts.distributed_worker import World, check
from tests.specs import Spec


@check(2, 3, smoke=True)
def ddp_replicas_stay_equal_whatever_torchs_random_state(world: World, spec: Spec) -> None:
    for view in (False, True):
        torch.manual_seed(world.rank)
        net = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
        opt = spec.make(net.named_parameters())
        reference, reference_opt = reference_for(spec)

        def gradients(step: int, net: Any = net) -> None:
            torch.rand(world.rank + 1)
            backward(net, world, step)

        follow(net.module, opt, reference, reference_opt, gradients, range(4))
        assert_same(net.module, opt, reference, reference_opt)
        tensors = [t for p in net.parameters() for t in (p, *opt.state[p].values()) if isinstance(t, torch.Tensor)]
        assert_replicas_equal(world, tensors)


@check(2)
def ddp_with_accumulated_gradients(world: World, spec: Spec) -> None:
    net = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    opt = spec.make(net.parameters())
    for _ in range(3):
        opt.zero_grad(set_to_none=False)
        x = torch.randn(3, 17).bfloat16()
        with net.no_sync():
            net(x).backward()
        net(x).backward()
        opt.step()
    assert_replicas_equal(world, list(net.parameters()))


@check(2)
def zero_redundancy_optimizer_keeps_replicas_equal(world: World, spec: Spec) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for view in (False, True):
        net = DistributedDataParallel(Net())
        opt = ZeroRedundancyOptimizer(net.parameters(), spec.cls, parameters_as_bucket_view=view, **spec.defaults)
        for step in range(3):
            backward(net, world, step)
            opt.step()
        assert_replicas_equal(world, list(net.parameters()))


def _one_named_group_each(net: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p], "param_names": [name]} for name, p in net.named_parameters()]


@check(1, 2, 3)
def zero_redundancy_optimizer_with_named_groups_gives_the_bits_of_one_process(world: World, spec: Spec) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Net()
    opt = ZeroRedundancyOptimizer(_one_named_group_each(net), spec.cls, **spec.defaults)
    reference, reference_opt = reference_for(spec)
    follow(net, opt, reference, reference_opt, lambda step: give_grads(net, step), range(4))
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


@check(2)
def zero_redundancy_optimizer_with_one_named_group_goes_by_position(world: World, spec: Spec) -> None:
    """Each process has some of the parameters and the names of all: no parameter may take the noise of another's name."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Net()
    names, parameters = zip(*net.named_parameters(), strict=True)
    group = {"params": list(parameters), "param_names": list(names)}
    opt = ZeroRedundancyOptimizer([group], spec.cls, **spec.defaults)
    give_grads(net, 0)
    opt.step()
    own = opt.optim.param_groups[0]["params"]
    assert [opt.optim.state[p]["stream"] for p in own] == list(range(len(own)))
    assert_replicas_equal(world, list(net.parameters()))


@check(2, 3)
def zero_redundancy_optimizer_saves_and_resumes(world: World, spec: Spec) -> None:
    """Its consolidated checkpoint loads into itself and into the plain class; both go on as the one that was saved."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Net()
    opt = ZeroRedundancyOptimizer(_one_named_group_each(net), spec.cls, state_dtype="fp32", **spec.defaults)
    for step in range(2):
        give_grads(net, step)
        opt.step()
    saved: dict[str, Any] = {}
    for rank in range(world.size):
        opt.consolidate_state_dict(to=rank)
        if rank == world.rank:
            saved = copy.deepcopy(opt.state_dict())

    again = copy.deepcopy(net)
    resumed = ZeroRedundancyOptimizer(_one_named_group_each(again), spec.cls, state_dtype="fp32", **spec.defaults)
    resumed.load_state_dict(copy.deepcopy(saved))
    single = copy.deepcopy(net)
    plain = spec.make(_one_named_group_each(single), state_dtype="fp32")
    plain.load_state_dict(saved)
    for step in range(2, 4):
        give_grads(net, step)
        copy_grads(net, again)
        copy_grads(net, single)
        opt.step()
        resumed.step()
        plain.step()
    for p, q, r in zip(net.parameters(), again.parameters(), single.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
        assert plain.state[r]["step"] == 4
