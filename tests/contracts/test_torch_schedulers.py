"""Every scheduler of torch on subulp's classes: what they write into groups, and that the next step uses it."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

from tests.bits import same_bits
from tests.models import make_params, set_grads
from tests.torch_tables import SWAPS, Swap, all_swaps

Make = Callable[[Any], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, power=0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=cycles(o)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=cycles(o)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, anneal_epochs=3),
}

CYCLING = ("CyclicLR", "OneCycleLR")
# A scheduler in SequentialLR and ChainedScheduler warns of the lr of the one before it; torch's classes do the same.
quiet = pytest.mark.filterwarnings("ignore:.*pass tensor.*:UserWarning")


def cycles(opt: torch.optim.Optimizer) -> bool:
    return any(key in opt.defaults for key in ("momentum", "betas"))


def momentum_of(group: dict[str, Any], key: str) -> Any:
    value = group.get(key)
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else value


def groups(params: list[Parameter], tensor: bool) -> list[dict[str, Any]]:
    # fp64: with fp32 tensors torch computes 1 - lr * weight_decay in fp32, ours does not.
    rates = [torch.tensor(r, dtype=torch.float64) if tensor else r for r in (1e-2, 3e-3)]
    return [{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)]


def advance(scheduler: Any, step: int) -> None:
    scheduler.step(1.0 + step) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def test_every_scheduler_of_torch_is_in_the_table():
    exported = {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}
    assert set(SCHEDULERS) == exported


@all_swaps
@quiet
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_rates_and_momenta_are_those_of_torchs_class(swap, name, tensor):
    """In every group and step; and parameters follow torch's."""
    params, reference = (make_params(((3, 4), (5, 2)), torch.float64) for _ in range(2))
    opts = swap.make(groups(params, tensor)), swap.theirs(groups(reference, tensor))
    schedulers = [SCHEDULERS[name](opt) for opt in opts]
    seen = []
    for step in range(8):
        for ours, theirs in zip(opts[0].param_groups, opts[1].param_groups, strict=True):
            assert float(ours["lr"]) == float(theirs["lr"])
            assert isinstance(ours["lr"], torch.Tensor) is isinstance(theirs["lr"], torch.Tensor)
            for key in ("momentum", "betas"):
                if key in theirs:
                    assert momentum_of(ours, key) == momentum_of(theirs, key), key
            seen.append((float(ours["lr"]), *(momentum_of(ours, key) for key in ("momentum", "betas"))))
        for ps, opt, scheduler in zip((params, reference), opts, schedulers, strict=True):
            set_grads(ps, step)
            opt.step()
            advance(scheduler, step)
        assert schedulers[0].get_last_lr() == [group["lr"] for group in opts[0].param_groups]
    assert len(set(seen[::2])) > 1
    for p, q in zip(params, reference, strict=True):
        # As in test_torch_tables.tolerance, over 8 steps.
        limit = 8 * 0.01 * 2.5**0.5 * 1.3 * 4 * 2.0**-8 if swap.matrices else 8 * 8 * 4 * 2.0**-52
        assert (p - q).abs().max() < limit


@pytest.mark.parametrize("swap", [swap for swap in SWAPS if swap.name != "Adafactor"], ids=repr)
@pytest.mark.parametrize("name", CYCLING)
def test_momenta_cycle_where_torchs_class_has_them(swap, name):
    """beta1 of Adam's kind, momentum of SGD and Muon; of a fresh SGD it becomes non-zero in mid-run."""
    params, reference = (make_params(((3, 4), (5, 2)), torch.float64) for _ in range(2))
    opts = swap.make(params, lr=1e-2), swap.theirs(reference, lr=1e-2)
    schedulers = [SCHEDULERS[name](opt) for opt in opts]
    key = "betas" if "betas" in opts[1].defaults else "momentum"
    found = []
    for step in range(8):
        found.append(momentum_of(opts[0].param_groups[0], key))
        assert found[-1] == momentum_of(opts[1].param_groups[0], key)
        for ps, opt, scheduler in zip((params, reference), opts, schedulers, strict=True):
            set_grads(ps, step)
            opt.step()
            scheduler.step()
    assert len(set(found)) > 3
    if swap.name == "Muon":
        assert opts[0].param_groups[0].get("betas") in (None, opts[0].defaults.get("betas"))


def test_cycling_needs_a_momentum():
    """Adafactor has none under torch's semantics, and torch's schedulers say so."""
    swap = next(swap for swap in SWAPS if swap.name == "Adafactor")
    for opt in swap.pair(make_params(((2, 2),)), make_params(((2, 2),)), {}):
        with pytest.raises(ValueError, match="momentum"):
            lr_scheduler.CyclicLR(opt, 1e-3, 1e-2, cycle_momentum=True)
        with pytest.raises(ValueError, match="momentum"):
            lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=4, cycle_momentum=True)


@all_swaps
@quiet
@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n not in ("LambdaLR", "MultiplicativeLR")])
def test_training_resumes_with_a_scheduler(swap, name):
    """torch's way: state dicts of both, then as if never interrupted. bf16: the noise goes on as well."""
    whole = make_params(((3, 4), (5, 2)))
    opt = swap.make(groups(whole, False))
    scheduler = SCHEDULERS[name](opt)
    for step in range(6):
        if step == 3:
            params = [Parameter(p.detach().clone()) for p in whole]
            saved = copy.deepcopy((opt.state_dict(), scheduler.state_dict()))
            other = swap.make(groups(params, False))
            resumed = SCHEDULERS[name](other)
            other.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
        set_grads(whole, step)
        opt.step()
        advance(scheduler, step)
    for step in range(3, 6):
        set_grads(params, step)
        other.step()
        advance(resumed, step)
    assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in other.param_groups]
    assert all(map(same_bits, whole, params))


@all_swaps
def test_the_order_of_steps_is_watched(swap):
    """torch warns when a scheduler steps first, or when step was replaced; else nothing does."""

    def fresh() -> tuple[Any, Any]:
        opt = swap.make(make_params(((2, 2),)))
        return opt, lr_scheduler.StepLR(opt, 3)

    opt, scheduler = fresh()
    with pytest.warns(UserWarning, match="how-to-adjust-learning-rate"):
        scheduler.step()
    opt, scheduler = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            opt.step()
            scheduler.step()
    opt, scheduler = fresh()
    wrapped = opt.step
    opt.step = types.MethodType(lambda self, *args: wrapped(*args), opt)
    opt.step()
    with pytest.warns(UserWarning, match="overridden"):
        scheduler.step()


@all_swaps
def test_schedulers_and_optimizers_are_freed_without_the_collector(swap):
    """No cycle holds them, nor what a step left behind."""

    def used(make: Make) -> tuple[Any, Any]:
        params = make_params(((2, 2),))
        opt = swap.make(params)
        scheduler = make(opt)
        set_grads(params, 0)
        opt.step()
        advance(scheduler, 0)
        return weakref.ref(opt), weakref.ref(scheduler)

    gc.collect()
    gc.disable()
    try:
        for name in ("LambdaLR", "CyclicLR", "OneCycleLR"):
            opt, scheduler = used(SCHEDULERS[name])
            assert scheduler() is None, name
            assert opt() is None, name
    finally:
        gc.enable()


@all_swaps
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_scheduled_optimizer_step(swap: Swap, way: str):
    params = make_params(((2, 2),))
    opt = swap.make(params)
    scheduler = lr_scheduler.StepLR(opt, 1)
    set_grads(params, 0)
    opt.step()
    scheduler.step()
    pair = (params, opt)
    copies, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for ps, optimizer in ((params, opt), (copies, other)):
        set_grads(ps, 1)
        optimizer.step()
    assert same_bits(params[0], copies[0])
    assert other.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
