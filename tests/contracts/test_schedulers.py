"""torch's learning-rate schedulers, with float and tensor rates, and what else a loop does to groups and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

import subulp
from tests.bits import same_bits
from tests.models import everything, make_params, set_grads, train
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.filterwarnings("ignore:.*pass tensor.*:UserWarning")
def test_rates_are_taken_up_each_step(name, tensor):
    """Equal bits with an optimizer that is told the rates by hand: they (and momenta) were neither late nor lost."""
    params, told = make_params(), make_params()

    def groups(ps: list[Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": ps[:3], "lr": torch.tensor(1e-2) if tensor else 1e-2},
            {"params": ps[3:], "lr": torch.tensor(3e-3) if tensor else 3e-3},
        ]

    opt, other = (subulp.AdamW(groups(p), stream=0) for p in (params, told))
    schedule = SCHEDULERS[name](opt)
    rates = set()
    for step in range(6):
        set_grads(params, step)
        set_grads(told, step)
        for mine, theirs in zip(opt.param_groups, other.param_groups, strict=True):
            theirs["lr"], theirs["betas"] = float(mine["lr"]), mine["betas"]
        rates.add(float(opt.param_groups[0]["lr"]))
        opt.step()
        other.step()
        schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()
    assert all(map(same_bits, everything(opt, params), everything(other, told)))
    assert len(rates) > 1


@all_optimizers
def test_hooks_run_once_a_step_and_in_order(spec):
    params = make_params()
    opt = spec.make(params)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    train(opt, params, 2)
    assert calls == ["pre", "post"] * 2


@all_optimizers
def test_a_late_group_starts_at_its_own_first_step(spec):
    first, late = make_params(((4, 4),)), make_params(((4, 4),), seed=3)
    opt = spec.make(first)
    train(opt, first, 3)
    opt.add_param_group({"params": late})
    set_grads(late, 9)
    opt.zero_grad(set_to_none=True)
    set_grads(late, 9)
    opt.step()
    assert float(opt.state[late[0]]["step"]) == 1
    with pytest.raises((ValueError, TypeError)):
        opt.add_param_group({"params": make_params(((2, 2),)), "lr": -1.0})
    assert len(opt.param_groups) == 2


@all_optimizers
def test_gradients_that_come_late_and_vanish(spec):
    params = make_params(((4, 4), (4, 4)))
    opt = spec.make(params)
    for step in range(4):
        set_grads(params, step)
        if step in (0, 3):
            params[1].grad = None
        opt.step()
    assert [float(opt.state[p]["step"]) for p in params] == [4, 2]


def test_tied_weights_step_once():
    torch.manual_seed(0)
    embed = torch.nn.Embedding(6, 4).bfloat16()
    head = torch.nn.Linear(4, 6, bias=False).bfloat16()
    head.weight = embed.weight
    model = torch.nn.Sequential(embed, head)
    opt = subulp.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(6)).float().square().sum().backward()
    opt.step()
    assert float(opt.state[embed.weight]["step"]) == 1
    assert len(opt.state) == 1


def test_averaged_model_and_clipping():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).bfloat16()
    average = swa_utils.AveragedModel(model)
    opt = subulp.AdamW(model.named_parameters(), lr=1e-2)
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 6).bfloat16()).float().square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        opt.step()
        average.update_parameters(model)
    assert int(average.n_averaged) == 3
    assert all(p.isfinite().all() for p in average.parameters())
