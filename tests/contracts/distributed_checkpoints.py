"""Checks with torch.distributed.checkpoint: every form of state dict, other numbers of processes, no early step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.contracts.distributed_fsdp import shard
from tests.contracts.distributed_models import Net, assert_same, follow, give_grads, reference_for
from tests.contracts.distributed_worker import World, check
from tests.specs import Spec

FORMS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full and flattened": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full and offloaded": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
DTYPES: tuple[dict[str, Any], ...] = ({}, {"state_dtype": "fp32"})
"""The second is the hard one: torch would cast the states to the dtype of the parameters."""
BEFORE, AFTER = range(3), range(3, 6)


def _sharded(world: World, spec: Spec, **options: Any) -> tuple[Net, Any]:
    net = shard(Net(), world.mesh)
    return net, spec.make(net.named_parameters(), **options)


def _train(net: Net, opt: Any, steps: range) -> None:
    for step in steps:
        give_grads(net, step)
        opt.step()


def _trained_reference(spec: Spec, steps: range, **options: Any) -> tuple[Net, Any]:
    net, opt = reference_for(spec, **options)
    _train(net, opt, steps)
    return net, opt


@check(1, 2, 3)
def dcp_returns_every_form_of_state_dict(world: World, spec: Spec) -> None:
    for dtypes in DTYPES:
        trained, trained_opt = _sharded(world, spec, **dtypes)
        _train(trained, trained_opt, BEFORE)
        half = _trained_reference(spec, BEFORE, **dtypes)
        full = _trained_reference(spec, range(6), **dtypes)
        for form, options in FORMS.items() if dtypes else list(FORMS.items())[:1]:
            saved = copy.deepcopy(get_optimizer_state_dict(trained, trained_opt, options=options))
            weights = copy.deepcopy(get_model_state_dict(trained))
            net, opt = _sharded(world, spec, **dtypes)
            set_model_state_dict(net, weights)
            if options.full_state_dict and options.cpu_offload and world.rank > 0:
                # Only rank 0 keeps such a state dict; it goes out to the others from there.
                assert not saved
            loading = StateDictOptions(
                full_state_dict=options.full_state_dict,
                # torch finds out by itself; with both options it fails for its own optimizers too (KeyError).
                flatten_optimizer_state_dict=options.flatten_optimizer_state_dict and not options.full_state_dict,
                broadcast_from_rank0=options.full_state_dict and options.cpu_offload,
            )
            set_optimizer_state_dict(net, opt, saved, options=loading)
            try:
                assert_same(net, opt, *half)
                _train(net, opt, AFTER)
                assert_same(net, opt, *full)
            except AssertionError as error:
                raise AssertionError(f"{form}, {dtypes}: {error}") from None


@check(1, 2, 3)
def a_full_checkpoint_loads_without_dcp(world: World, spec: Spec) -> None:
    """The state dict of one process goes into a sharded optimizer by load_state_dict alone, and keeps its bits."""
    reference, reference_opt = _trained_reference(spec, BEFORE, state_dtype="fp32")
    net, opt = _sharded(world, spec, state_dtype="fp32")
    set_model_state_dict(net, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    opt.load_state_dict(reference_opt.state_dict())
    assert_same(net, opt, reference, reference_opt)
    _train(net, opt, AFTER)
    _train(reference, reference_opt, AFTER)
    assert_same(net, opt, reference, reference_opt)


@check(1, 2, 3)
def saving_before_the_first_step_leaves_no_trace(world: World, spec: Spec) -> None:
    """torch makes the state that it saves by a step with zero gradients, and lets it count (Megatron-LM #5976)."""
    for options in ({}, {"lr": torch.tensor(1e-2)}, {"capturable": True}):
        try:
            net, opt = _sharded(world, spec, **options)
        except NotImplementedError:
            continue  # no such mode
        weights = copy.deepcopy(get_model_state_dict(net))
        saved: Any = get_optimizer_state_dict(net, opt)
        assert all(entry["step"] == 0 for entry in saved["state"].values())
        assert set(saved["state"]) == {name for name, _ in net.named_parameters()}
        again, again_opt = _sharded(world, spec, **options)
        set_model_state_dict(again, weights)
        set_optimizer_state_dict(again, again_opt, copy.deepcopy(saved))
        reference, reference_opt = _trained_reference(spec, BEFORE, **options)
        for a, b in ((net, opt), (again, again_opt)):
            _train(a, b, BEFORE)
            assert_same(a, b, reference, reference_opt)
        assert all(opt.state[p]["step"] == 3 for p in net.parameters())


@check(2, 3)
def state_made_early_does_not_count(world: World, spec: Spec) -> None:
    net, opt = _sharded(world, spec)
    opt.init_state()
    assert all(opt.state[p]["step"] == 0 for p in net.parameters())
    saved: Any = get_optimizer_state_dict(net, opt)
    assert all(entry["step"] == 0 for entry in saved["state"].values())
    _train(net, opt, BEFORE)
    assert_same(net, opt, *_trained_reference(spec, BEFORE))


@check(2, 3, smoke=True)
def a_first_step_with_lr_0_and_real_gradients_counts(world: World, spec: Spec) -> None:
    """A warm-up from 0: only torch's dummy step, whose gradients are all zero, is not counted.

    The gradient is zero in the shards of all processes but the last, and they must agree that it counts.
    """
    reference, reference_opt = reference_for(spec, lr=0.0)
    net, opt = _sharded(world, spec, lr=0.0)

    def gradients(step: int) -> None:
        give_grads(net, step)
        for p in net.parameters():
            if world.rank < world.size - 1:
                p.grad.to_local().zero_()

    follow(net, opt, reference, reference_opt, gradients, range(1))
    for groups in (opt.param_groups, reference_opt.param_groups):
        groups[0]["lr"] = 1e-2
    follow(net, opt, reference, reference_opt, gradients, range(1, 3))
    assert_same(net, opt, reference, reference_opt)
    assert opt.state[net.wide.weight]["step"] == 3


@check(2, 3)
def dcp_with_groups_frozen_and_idle_parameters(world: World, spec: Spec) -> None:
    """Two groups, one parameter frozen, and one that had no gradient yet: torch misses its state without init_state()."""

    def build() -> tuple[Net, Any]:
        net = shard(Net(), world.mesh)
        net.first.weight.requires_grad_(False)
        named = list(net.named_parameters())
        decayed = [(name, p) for name, p in named if p.dim() > 1]
        rest = [(name, p) for name, p in named if p.dim() <= 1]
        rate = 1.0 if spec.name == "Prodigy" else 1e-3  # it estimates one rate for all groups
        return net, spec.make([{"params": decayed}, {"params": rest, "lr": rate}])

    def train(net: Net, opt: Any, steps: range) -> None:
        for step in steps:
            give_grads(net, step)
            net.first.weight.grad = None
            if step < 3:
                net.wide.bias.grad = None
            opt.step()

    for early in (True, False):
        net, opt = build()
        if early:
            opt.init_state()
        train(net, opt, BEFORE)
        saved: Any = copy.deepcopy(get_optimizer_state_dict(net, opt))
        assert "first.weight" not in saved["state"]
        again, again_opt = build()
        set_model_state_dict(again, copy.deepcopy(get_model_state_dict(net)))
        if not early:
            with pytest.raises(RuntimeError, match=r"wide\.bias"):
                set_optimizer_state_dict(again, again_opt, copy.deepcopy(saved))
        set_optimizer_state_dict(again, again_opt, saved, options=StateDictOptions(strict=early))
        train(net, opt, AFTER)
        train(again, again_opt, AFTER)
        assert_same(again, again_opt, net, opt)
        assert again_opt.state[again.wide.bias]["step"] == 3
        assert again_opt.param_groups[1]["lr"] == opt.param_groups[1]["lr"]


def _folder(world: World, spec: Spec, size: int, flat: bool) -> str:
    return str(world.directory / f"saved-{spec}-{size}-{'flat' if flat else 'nested'}")


@check(1, 2, 3)
def dcp_saves_to_disk(world: World, spec: Spec) -> None:
    net, opt = _sharded(world, spec, state_dtype="fp32")
    _train(net, opt, BEFORE)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        content = {
            "model": get_model_state_dict(net),
            "optimizer": get_optimizer_state_dict(net, opt, options=options),
        }
        save(content, checkpoint_id=_folder(world, spec, world.size, flat))


@check(1, 2, 3, late=True)
def dcp_loads_what_another_number_of_processes_saved(world: World, spec: Spec) -> None:
    half = _trained_reference(spec, BEFORE, state_dtype="fp32")
    full = _trained_reference(spec, range(6), state_dtype="fp32")
    for size in (1, 2, 3):
        for flat in (False, True):
            net, opt = _sharded(world, spec, state_dtype="fp32")
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            content = {
                "model": get_model_state_dict(net),
                "optimizer": get_optimizer_state_dict(net, opt, options=options),
            }
            load(content, checkpoint_id=_folder(world, spec, size, flat))
            set_model_state_dict(net, content["model"])
            set_optimizer_state_dict(net, opt, content["optimizer"], options=options)
            assert_same(net, opt, *half)
            _train(net, opt, AFTER)
            assert_same(net, opt, *full)
