"""The calls that trainers make which are not packages one can install: how they construct, step and free."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import subulp
from tests.bits import same_bits
from tests.models import generator, make_params, set_grads
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return (model(torch.randn(4, 6, generator=generator(step)).bfloat16()).float() - 1).square().mean()


def test_sd_scripts_resolves_a_class_path_and_literal_arguments():
    """``--optimizer_type subulp.AdamW --optimizer_args weight_decay=0.01 betas=(0.9,0.99)``; ``train()`` if there is one."""
    arguments = ["weight_decay=0.01", "betas=(0.9, 0.99)", "state_dtype='bf16'"]
    kwargs = {key: ast.literal_eval(value) for key, value in (a.split("=", 1) for a in arguments)}
    module, _, name = "subulp.AdamW".rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    model = net()
    trainable = [{"params": list(model[0].parameters()), "lr": 1e-3}, {"params": list(model[2].parameters())}]
    opt = cls(trainable, lr=1e-2, **kwargs)
    assert not hasattr(opt, "train")
    assert not name.lower().endswith("schedulefree")
    assert cls.__module__.startswith("subulp")  # logged
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 1e-2]
    loss_of(model, 0).backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


@all_optimizers
def test_sd_scripts_fused_backward_pass(spec):
    """``optimizer.step_param(tensor, group)`` in hooks, then ``tensor.grad = None``."""
    model, plain = net(), net()
    opt, other = spec.make(model.parameters()), spec.make(plain.parameters())
    for group in opt.param_groups:
        for p in group["params"]:

            def hook(tensor: torch.Tensor, group: dict[str, Any] = group) -> None:
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


def test_ai_toolkit_passes_its_own_eps():
    params = make_params()
    opt = subulp.AdamW(params, lr=float("1e-4"), eps=1e-6, weight_decay=0.01, betas=[0.9, 0.99])
    set_grads(params, 0)
    opt.step()
    assert opt.param_groups[0]["eps"] == 1e-6


def test_simpletuner_merges_settings_into_keywords():
    settings = {"betas": (0.9, 0.999), "weight_decay": 1e-2, "eps": 1e-6}
    settings.update({"weight_decay": 0.1, "seed": 3})
    opt = subulp.AdamW([{"params": make_params(), "weight_decay": 0.0}], lr=1e-4, **settings)
    assert opt.param_groups[0]["weight_decay"] == 0.0
    assert opt.param_groups[0]["seed"] == 3


def test_diffusion_pipe_releases_gradients_with_an_optimizer_for_each_parameter():
    """It passes ``foreach=False`` if the signature has it, and edits ``betas`` in place."""
    model, plain = net(), net()
    kwargs: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.01}
    if "foreach" in inspect.signature(subulp.AdamW).parameters:
        kwargs["foreach"] = False
    opts: dict[Any, subulp.AdamW] = {p: subulp.AdamW([(name, p)], **kwargs) for name, p in model.named_parameters()}
    kwargs["betas"][1] = 0.999

    def hook(p: torch.Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    other = subulp.AdamW(plain.named_parameters(), lr=1e-2, betas=[0.9, 0.999], weight_decay=0.01)
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
        other.step()
        other.zero_grad()
    # With names the noise is the one optimizer's.
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())


def test_torchtitan_passes_fused_and_foreach_and_reads_names():
    model = net()
    kwargs = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True, "foreach": False}
    opt = subulp.AdamW(model.named_parameters(), **kwargs)
    assert opt.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    # Its init_optim_state: a dummy step with zero gradients and lr 0, which must leave no trace.
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step(closure=None)
    opt.param_groups[0]["lr"] = 1e-3
    opt.zero_grad(set_to_none=True)
    assert all(same_bits(p.detach(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(float(opt.state[p]["step"]) == 0 for p in model.parameters())
    assert all("exp_avg_sq" in opt.state[p] for p in model.parameters())


def test_axolotl_passes_strings():
    with pytest.raises(TypeError, match=r"lr='1e-4' is a str.*float"):
        subulp.AdamW(make_params(), lr="1e-4")
    opt = subulp.from_config("adamw", make_params(), lr="1e-4", weight_decay="0.1")
    assert opt.param_groups[0]["lr"] == 1e-4
