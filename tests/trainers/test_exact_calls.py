"""The calls of trainers that are not tried themselves: how each finds the class, and with what it calls it.

docs/integrations.md names the version of each that was read.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import subulp
from tests.bits import same_bits
from tests.models import generator, make_params, set_grads


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return (model(torch.randn(4, 6, generator=generator(step)).bfloat16()).float() - 1).square().mean()


def trains(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    first = loss_of(model, 0).item()
    for step in range(20):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    assert loss_of(model, 0).item() < first


def from_path(path: str) -> Any:
    """``package.module.name``, as each that takes an import path resolves it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_sd_scripts_and_musubi_tuner_take_a_path_and_literal_arguments():
    """``--optimizer_type subulp.AdamW --optimizer_args weight_decay=0.01 betas=(0.9,0.99)``; ``train()`` if there is one."""
    kwargs = {}
    for argument in ("weight_decay=0.01", "betas=(0.9, 0.99)", "state_dtype='bf16'"):
        key, value = argument.split("=")
        kwargs[key] = ast.literal_eval(value)
    optimizer_type = "subulp.AdamW"
    cls = from_path(optimizer_type)
    # Names that it treats otherwise.
    assert not optimizer_type.lower().endswith(("8bit", "schedulefree"))
    model = net()
    trainable = [{"params": list(model[0].parameters()), "lr": 1e-3}, {"params": list(model[2].parameters())}]
    opt = cls(trainable, lr=1e-2, **kwargs)
    assert not hasattr(opt, "train")
    assert cls.__module__.startswith("subulp")  # logged
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 1e-2]
    trains(model, opt)


def test_verl_imports_a_name_from_a_module():
    """``optimizer_impl: subulp``, ``optimizer: AdamW``: betas only for names with "adam"; the overrides come last."""
    config = SimpleNamespace(optimizer="AdamW", optimizer_impl="subulp", lr=1e-2, weight_decay=0.01, betas=[0.9, 0.999])
    arguments: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "adam" in config.optimizer.lower():
        arguments["betas"] = config.betas
    arguments |= {"seed": 1, "betas": [0.9, 0.95]}
    model = net()
    opt = getattr(importlib.import_module(config.optimizer_impl), config.optimizer)(model.parameters(), **arguments)
    assert tuple(opt.param_groups[0]["betas"]) == (0.9, 0.95)
    trains(model, opt)


@pytest.mark.parametrize("key", ["_target_", "_component_"])
@pytest.mark.parametrize("how", ["positional", "params="])
def test_hydra_automodel_and_torchtune_instantiate_a_node(key, how):
    """``_target_: subulp.AdamW`` (Hydra, NeMo Automodel) and ``_component_`` (torchtune); parameters by either way."""
    node: dict[str, Any] = {key: "subulp.AdamW", "lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0, "seed": 1}
    cls = from_path(node.pop(key))
    model = net()
    opt = cls(model.parameters(), **node) if how == "positional" else cls(params=list(model.parameters()), **node)
    trains(model, opt)


def test_automodel_adds_foreach_if_the_class_takes_it():
    """With tensor parallelism; a ``**kwargs`` counts as taking it."""
    signature = inspect.signature(subulp.AdamW).parameters
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    subulp.AdamW(params=make_params(), lr=1e-3, foreach=False)


def test_ai_toolkit_calls_a_class_in_its_chain():
    """``elif lower_type == 'subulp_adamw'``: lr from a YAML number or string, eps of its own, then ``optimizer_params``."""
    params = make_params()
    optimizer_params: dict[str, Any] = {"weight_decay": 0.01, "betas": [0.9, 0.99]}
    opt = subulp.AdamW(params, lr=float("1e-4"), **{"eps": 1e-6, **optimizer_params})
    set_grads(params, 0)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    assert opt.param_groups[0]["eps"] == 1e-6


def simpletuner(entry: Any, config: str, lr: float) -> Callable[..., Any]:
    """Its defaults, overridden by ``--optimizer_config``; keywords that a signature without ``**`` lacks are dropped."""
    cls, settings = entry.get("class"), copy.deepcopy(entry.get("default_settings", {}))
    for key, value in (setting.split("=") for setting in config.split(",")):
        number = float if "." in value or "e-" in value else int if value.isdigit() else str
        settings[key] = number(value)
    signature = inspect.signature(cls.__init__).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        settings = {key: value for key, value in settings.items() if key in signature}
    return partial(cls, **{"lr": lr} | settings)


SIMPLETUNER_ENTRY = {
    "precision": "any",
    "default_settings": {"betas": (0.9, 0.999), "weight_decay": 1e-2, "eps": 1e-8},
    "class": subulp.AdamW,
}


def test_simpletuner_has_a_table_of_dicts():
    make = simpletuner(SIMPLETUNER_ENTRY, "weight_decay=0.1,seed=3,state_dtype=fp32", 1e-2)
    model = net()
    opt = make([{"params": list(model[0].parameters()), "lr": 1e-3}, {"params": list(model[2].parameters())}])
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 1e-2]
    group = opt.param_groups[0]
    assert (group["weight_decay"], group["seed"], group["state_dtype"]) == (0.1, 3, "fp32")
    trains(model, opt)
    # Our **options switch its filter off: a misspelt setting is an error, as it should be.
    with pytest.raises(TypeError, match="weight_decai"):
        simpletuner(SIMPLETUNER_ENTRY, "weight_decai=0.1", 1e-2)(make_params())
    with pytest.raises(AttributeError):
        simpletuner(subulp.AdamW, "seed=3", 1e-2)


def test_torchtitan_gives_every_setting_in_the_groups():
    """Names, ``fused`` and ``foreach`` too; nothing but the groups goes to the constructor."""
    model = net()
    named = dict(model.named_parameters())
    implementation = {"fused": True, "foreach": False}
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    opt = subulp.AdamW([{"params": [*named.values()], "param_names": [*named], **implementation, **settings}])
    assert opt.param_groups[0]["param_names"] == [*named]
    # Its init_optim_state: a dummy step with zero gradients and lr 0, which must leave no trace.
    assert not opt.state
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


def test_timm_looks_up_what_follows_the_last_underscore():
    """``create_optimizer_v2(model, "subulpadamw")`` from an ``OptimInfo`` with ``has_betas``, and no momentum."""
    registry = {"adamw": torch.optim.AdamW, "subulpadamw": subulp.AdamW}

    def look_up(name: str) -> Any:
        return registry[name.lower().split("_")[-1]]

    assert look_up("subulp_adamw") is torch.optim.AdamW  # so the name has no underscore
    model = net()
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.05}]
    keywords: dict[str, Any] = {"weight_decay": 0.0, "lr": 1e-2, "eps": 1e-8, "betas": [0.9, 0.99], "foreach": True}
    opt = look_up("subulpadamw")(groups, **keywords)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.0, 0.05]
    trains(model, opt)


def test_diffusers_scripts_call_a_class():
    """train_text_to_image.py passes lr; train_dreambooth_flux.py has it in the groups."""
    keywords: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 1e-4, "eps": 1e-8}
    model = net()
    trains(model, subulp.AdamW(model.parameters(), lr=1e-2, **keywords))
    model = net()
    trains(model, subulp.AdamW([{"params": list(model.parameters()), "lr": 1e-2}], **keywords))


def test_strings_from_a_configuration_file():
    with pytest.raises(TypeError, match=r"lr='1e-4' is a str.*float"):
        subulp.AdamW(make_params(), lr="1e-4")
    opt = subulp.from_config("adamw", make_params(), lr="1e-4", weight_decay="0.1")
    assert opt.param_groups[0]["lr"] == 1e-4
