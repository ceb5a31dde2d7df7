"""OneTrainer's settings on the way to subulp's optimizers: none is lost in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.examples.onetrainer_host import Config, Groups, OptimizerConfig, adapter, create
from tests.models import make_params, train


def made(optimizer: str, as_dict: bool = False, shapes: Any = ((4, 3), (5,)), **settings: Any) -> Any:
    config = OptimizerConfig(optimizer, **settings)
    groups = Groups({"unet": make_params(shapes)})
    if as_dict:
        return adapter.create_optimizer(groups.parameters_for_optimizer(Config(config)), config.to_dict())
    return create(groups, Config(config))


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "settings", "expected"),
    [
        ("ADAMW", {"beta1": 0.5}, {"betas": (0.5, 0.999)}),
        ("ADAM", {"beta2": 0.5}, {"betas": (0.9, 0.5)}),
        ("LION", {"beta1": 0.5}, {"betas": (0.5, 0.99)}),
        ("CAME", {"beta3": 0.5}, {"betas": (0.9, 0.999, 0.5)}),
        ("CAME", {"eps2": 1e-10}, {"eps": (1e-30, 1e-10)}),
        ("CAME_8BIT", {"eps": 1e-10, "beta1": 0.1, "beta2": 0.2}, {"eps": (1e-10, 1e-16), "betas": (0.1, 0.2, 0.9999)}),
        ("ADAFACTOR", {"eps": 1e-20}, {"eps": (1e-20, 1e-3)}),
        ("ADAFACTOR", {"eps2": 1e-2, "beta1": 0.5}, {"eps": (1e-30, 1e-2), "beta1": 0.5}),
        (
            "PRODIGY",
            {"beta2": 0.99, "growth_rate": 1.02, "decouple": True},
            {"betas": (0.9, 0.99), "growth_rate": 1.02},
        ),
        ("PRODIGY", {"growth_rate": float("inf"), "decouple": True}, {"growth_rate": float("inf")}),
        ("ADAMW", {"capturable": False, "differentiable": False, "amsgrad": True}, {"amsgrad": True}),
        ("SGD", {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "nesterov": True}),
        ("MUON", {"momentum": 0.5}, {"momentum": 0.5, "weight_decay": 0.0, "nesterov": True}),
    ],
)
def test_settings_arrive_also_if_only_some_are_given(optimizer, settings, expected, as_dict, caplog):
    opt = made(optimizer, as_dict, **settings)
    assert {key: opt.param_groups[0][key] for key in expected} == expected
    assert caplog.text == ""


@pytest.mark.parametrize("as_dict", [False, True])
def test_what_has_no_effect_is_named_once(as_dict, caplog):
    made("CAME", as_dict, use_cautious=True, min_8bit_size=16384, fused_back_pass=True, momentum=0.5, k=3)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith("CAME takes no notice of: ")
    for part in ("use_cautious=True", "min_8bit_size=16384", "momentum=0.5", "k=3"):
        assert part in message
    assert "fused_back_pass" not in message


@pytest.mark.parametrize(
    "optimizer", ["ADAM", "ADAMW", "SGD", "LION", "SIGNSGD", "ADAFACTOR", "CAME", "CAME_8BIT", "PRODIGY", "MUON"]
)
def test_defaults_raise_no_message_and_train(optimizer, caplog):
    opt = made(optimizer, fused=True, foreach=True, fused_back_pass=True)
    train(opt, [p for group in opt.param_groups for p in group["params"]], 2)
    assert caplog.text == ""
    assert all(group["stochastic_rounding"] for group in opt.param_groups)


def test_adafactors_relative_step_takes_no_rate():
    opt = made("ADAFACTOR", relative_step=True, scale_parameter=True)
    assert opt.param_groups[0]["lr"] is None
    assert opt.param_groups[0]["initial_lr"] == 1e-2
    opt = made("ADAFACTOR")
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["relative_step"]) == (1e-2, False)


class Parts:
    """Weights as a model has them: linear, convolution, a stack, a bias, a scalar, one that is frozen."""

    def __init__(self) -> None:
        shapes = ((6, 4), (6, 3, 2, 2), (3, 4, 5), (6,), (), (4, 4))
        self.linear, self.convolution, self.stack, self.bias, self.scalar, self.frozen = make_params(shapes)
        self.frozen.requires_grad_(False)

    def groups(self) -> Groups:
        unet = [self.linear, self.convolution, self.stack, self.bias, self.frozen]
        return Groups({"unet": unet, "text_encoder_1_lora": [self.scalar]})

    def all(self) -> list[Parameter]:
        return [self.linear, self.convolution, self.stack, self.bias, self.scalar]


def test_muon_takes_what_onetrainer_sends_it():
    """Everything with other than one dimension that its filter names; the rest has settings of its own."""
    parts = Parts()
    keys = {id(p): "muon" for p in (parts.linear, parts.convolution, parts.stack)}
    keys |= {id(p): "adam" for p in (parts.bias, parts.scalar)}
    adam = {"beta1": 0.8, "eps": 1e-6, "weight_decay": 0.3, "optimizer": "ADAMW", "fused": True}
    settings = {"MuonWithAuxAdam": True, "muon_adam_lr": 3e-4, "muon_te1_adam_lr": 1e-5, "muon_adam_config": adam}
    opt = create(parts.groups(), Config(OptimizerConfig("MUON", **settings)), layer_keys=keys)
    rows = [(g["name"], g["optim_type"], g["use_muon"], g["lr"], g["initial_lr"]) for g in opt.param_groups]
    assert rows == [
        ("unet", "muon", True, 1e-2, 1e-2),
        ("unet", "adam", False, 3e-4, 3e-4),
        ("text_encoder_1_lora", "adam", False, 1e-5, 1e-5),
    ]
    assert [len(group["params"]) for group in opt.param_groups] == [3, 1, 1]
    for group in opt.param_groups[1:]:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 0.3)
    assert opt.param_groups[0]["weight_decay"] == 0.0
    matrix = Parameter(parts.convolution.detach().reshape(6, 12).clone())
    alone = subulp.Muon([{"params": [("unet_muon.1", matrix)]}], lr=1e-2, weight_decay=0.0)
    for step in range(2):
        train(opt, parts.all(), 1, start=step)
        matrix.grad = parts.convolution.grad.reshape(6, 12).clone()
        alone.step()
    assert same_bits(parts.convolution.detach().reshape(6, 12), matrix.detach())


def test_muon_without_layers_goes_by_dimensions_and_names_what_it_ignores(caplog):
    parts = Parts()
    config = OptimizerConfig("MUON", muon_adam_config={"use_atan2": True, "beta2": None})
    with caplog.at_level(logging.WARNING):
        opt = create(parts.groups(), Config(config), layer_keys={id(parts.linear): "adam"})
    assert [(g["optim_type"], len(g["params"])) for g in opt.param_groups] == [("muon", 3), ("adam", 1), ("adam", 1)]
    assert opt.param_groups[1]["lr"] == 1e-2
    assert [record.getMessage() for record in caplog.records] == [
        "Muon takes no notice of: muon_adam_config.use_atan2=True."
    ]
    train(opt, parts.all(), 2)
    split = [{"name": "a", "params": [parts.linear], "lr": 0.1, "initial_lr": 0.1, "optim_type": "adam"}]
    assert adapter.create_optimizer(split, {"optimizer": "MUON"}).param_groups[0]["use_muon"] is False


def test_noise_follows_the_group_and_not_what_stands_before_it():
    lora, more = make_params(((5, 4),)), make_params(((3, 3),))
    config = Config(OptimizerConfig("ADAMW"))
    alone = create(Groups({"lora": lora}), config)
    beside = make_params(((5, 4),))
    both = create(Groups({"embedding": more, "lora": beside}), config)
    for step in range(3):
        torch.manual_seed(step)
        for p in (*lora, *beside):
            p.grad = torch.full_like(p, 0.3)
        alone.step()
        both.step()
    assert same_bits(lora[0].detach(), beside[0].detach())
