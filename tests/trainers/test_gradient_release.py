"""Trainers that update within the backward pass: one optimizer for each parameter, or for a few, or hooks of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subulp
from tests.bits import same_bits
from tests.models import generator
from tests.packages import huggingface
from tests.specs import SPECS
from tests.trainers.test_exact_calls import loss_of, net

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def per_parameter(params: Iterable[Tensor], cls: Any, **keywords: Any) -> dict[Tensor, Any]:
    """``cls([p], ...)`` without names, stepped in a hook: diffusion-pipe's gradient_release, torchtune's optimizer_in_bwd."""
    opts = {p: cls([p], **keywords) for p in params}

    def hook(p: Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in opts:
        p.register_post_accumulate_grad_hook(hook)
    return opts


def trains(model: nn.Module) -> None:
    first = loss_of(model, 0).item()
    for step in range(20):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
    assert loss_of(model, 0).item() < first


def test_diffusion_pipe_releases_gradients():
    """``foreach=False`` if the signature has it; betas scaled in their list first; state_dicts by number."""
    kwargs: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.01, "eps": 1e-8}
    if "foreach" in inspect.signature(subulp.AdamW).parameters:
        kwargs["foreach"] = False
    for i in range(len(kwargs["betas"])):
        kwargs["betas"][i] = kwargs["betas"][i] ** (1 / 4)
    model = net()
    opts = per_parameter(model.parameters(), subulp.AdamW, **kwargs)
    trains(model)
    assert {tuple(opt.param_groups[0]["betas"]) for opt in opts.values()} == {(0.9**0.25, 0.99**0.25)}

    saved = {i: opt.state_dict() for i, opt in enumerate(opts.values())}
    twin = net()
    twin.load_state_dict(model.state_dict())
    others = per_parameter(twin.parameters(), subulp.AdamW, **kwargs)
    for i, opt in enumerate(others.values()):
        opt.load_state_dict(saved[i])
    for step in range(20, 23):
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_torchtune_updates_in_backward():
    model = net()
    per_parameter(list(model.parameters()), subulp.AdamW, lr=1e-2, weight_decay=0.01)
    trains(model)


def moved(make: Callable[[list[nn.Parameter]], list[Any]], n: int = 4096) -> list[Tensor]:
    """Which elements a small step moved, for two equal parameters with equal gradients."""
    g = generator(0)
    weight, grad = torch.randn(n, generator=g).bfloat16(), torch.randn(n, generator=g).bfloat16()
    params = [nn.Parameter(weight.clone()) for _ in range(2)]
    opts = make(params)
    for p in params:
        p.grad = grad.clone()
    for opt in opts:
        opt.step()
    return [p.detach() != weight for p in params]


@pytest.mark.parametrize("cls", [subulp.AdamW, subulp.Lion])
def test_equal_parameters_of_unnamed_optimizers_do_not_round_alike(cls):
    """``klass([p])`` for each parameter, as the hosts do: every parameter is the first of its optimizer."""
    # Each optimizer without names begins its streams apart from the others' (group option ``stream``).
    first, second = moved(lambda params: [cls([p], lr=1e-4, weight_decay=0.0) for p in params])
    assert 100 < int(first.sum()) < 3000
    # Independent masks with these frequencies agree this often; the same noise would agree everywhere.
    same = float((first == second).float().mean())
    a, b = float(first.float().mean()), float(second.float().mean())
    assert not torch.equal(first, second)
    assert same < 1 - 0.25 * (a * (1 - b) + b * (1 - a))


def test_equal_parameters_of_one_optimizer_or_with_names_do_not_round_alike():
    first, second = moved(lambda params: [subulp.AdamW(params, lr=1e-4)])
    assert not torch.equal(first, second)
    first, second = moved(lambda params: [subulp.AdamW([(f"p{i}", p)], lr=1e-4) for i, p in enumerate(params)])
    assert not torch.equal(first, second)


def test_sd_scripts_fused_optimizer_groups():
    """A few optimizers, each stepped by the hook of its last parameter; the loop steps the schedulers alone."""
    model = net()
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-2}]
    opts = [subulp.AdamW([group], lr=1e-2, weight_decay=0.01) for group in groups]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step) for opt in opts]
    of_parameter = {p: i for i, opt in enumerate(opts) for group in opt.param_groups for p in group["params"]}
    hooked = [0, 0]

    def hook(p: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(p, 1.0)
        i = of_parameter[p]
        hooked[i] += 1
        if hooked[i] == 2:
            opts[i].step()
            opts[i].zero_grad(set_to_none=True)

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    first = loss_of(model, 0).item()
    for step in range(20):
        hooked[:] = [0, 0]
        loss_of(model, step).backward()
        for scheduler in schedulers:
            scheduler.step()
    assert loss_of(model, 0).item() < first
    assert all(float(opt.state[p]["step"]) == 20 for opt in opts for group in opt.param_groups for p in group["params"])


@all_optimizers
def test_hooks_that_call_step_param(spec):
    """sd-scripts' and musubi-tuner's hook: ``optimizer.step_param(tensor, group)``, then ``tensor.grad = None``."""
    model, plain = net(), net()
    opt, other = spec.make(model.named_parameters()), spec.make(plain.named_parameters())
    for group in opt.param_groups:
        for p in group["params"]:

            def hook(tensor: Tensor, group: dict[str, Any] = group) -> None:
                opt.step_param(tensor, group)
                tensor.grad = None

            p.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
        loss_of(plain, step).backward()
        other.step()
        other.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


class TestAccelerate:
    """sd-scripts' objects: the optimizer and scheduler come out of Accelerate, which wraps them."""

    pytestmark = huggingface

    def prepared(self) -> tuple[Any, Any, Any, Any]:
        accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(net())
        opt = subulp.AdamW(model.named_parameters(), lr=1e-2)
        opt, scheduler = accelerator.prepare(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step))
        return accelerator, model, opt, scheduler

    def reference(self, steps: int) -> nn.Module:
        """Each gradient clipped alone, as updates within the backward pass must."""
        model = net()
        opt = subulp.AdamW(model.named_parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
        for step in range(steps):
            loss_of(model, step).backward()
            for p in model.parameters():
                torch.nn.utils.clip_grad_norm_(p, 0.1)
            opt.step()
            opt.zero_grad()
            scheduler.step()
        return model

    def test_one_line_after_prepare_and_the_loop_as_it_is(self):
        accelerator, model, opt, scheduler = self.prepared()
        subulp.FusedBackward(opt.optimizer, max_grad_norm=0.1)  # the line
        for step in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                assert all(p.grad is None for p in model.parameters())
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                scheduler.step()
                opt.zero_grad(set_to_none=True)
        for p, q in zip(model.parameters(), self.reference(4).parameters(), strict=True):
            assert same_bits(p.detach(), q.detach())

    @pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
    def test_its_own_fused_backward_pass_with_the_update_put_back(self):
        accelerator, model, opt, scheduler = self.prepared()
        assert not hasattr(opt, "step_param")  # the wrapper passes nothing on
        opt.step_param = opt.optimizer.step_param  # in place of patch_adafactor_fused(optimizer)
        for group in opt.param_groups:
            for p in group["params"]:

                def hook(tensor: Tensor, group: dict[str, Any] = group) -> None:
                    # The host passes the tensor, which Accelerate 1.15 takes for a list of rows, and clips nothing.
                    accelerator.clip_grad_norm_([tensor], 0.1)
                    opt.step_param(tensor, group)
                    tensor.grad = None

                p.register_post_accumulate_grad_hook(hook)
        for step in range(4):
            accelerator.backward(loss_of(model, step))
            scheduler.step()
        for p, q in zip(model.parameters(), self.reference(4).parameters(), strict=True):
            assert same_bits(p.detach(), q.detach())
