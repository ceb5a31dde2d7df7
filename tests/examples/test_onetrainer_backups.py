"""OneTrainer's backups: groups by unique name, each for the optimizer that wrote it, and run state that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.examples.onetrainer_host import Config, Groups, OptimizerConfig, create, save
from tests.models import make_params, set_grads, train


def copies(groups: Groups) -> Groups:
    return Groups(
        {name: [Parameter(p.detach().clone()) for p in params] for name, params in groups.groups.items()},
        groups.display,
    )


def run(opt: Any, groups: Groups, steps: int, start: int = 0) -> None:
    """Gradients by group, whatever the order of groups is."""
    for step in range(start, start + steps):
        for name, params in groups.groups.items():
            set_grads(params, step + sum(map(ord, name)))
        opt.step()


def check_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert same_bits(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key], key


CONFIGS = [
    OptimizerConfig("ADAMW", weight_decay=0.01),
    OptimizerConfig("ADAM"),
    OptimizerConfig("ADAFACTOR"),
    OptimizerConfig("CAME", weight_decay=0.01),
    OptimizerConfig("LION"),
    OptimizerConfig("SGD", momentum=0.9),
    OptimizerConfig("PRODIGY", d0=1e-3, decouple=True, slice_p=3),
    OptimizerConfig("MUON", MuonWithAuxAdam=True, muon_adam_lr=1e-3),
]
all_optimizers = pytest.mark.parametrize("settings", CONFIGS, ids=lambda settings: settings.optimizer)


def trained(settings: OptimizerConfig, tmp_path: Any) -> tuple[Groups, Any, Any]:
    groups = Groups(
        {"unet": make_params(((4, 3), (5,))), "te": make_params(((6, 2), (2, 2)), seed=1)}, {"te": "encoder"}
    )
    config = Config(settings, 1.0 if settings.optimizer == "PRODIGY" else 1e-2)
    opt = create(groups, config)
    run(opt, groups, 3)
    return groups, config, (opt, save(opt, groups, config, tmp_path))


@all_optimizers
@pytest.mark.parametrize("reordered", [False, True])
def test_training_goes_on_bit_for_bit_also_if_groups_are_reordered(settings, reordered, tmp_path, caplog):
    groups, config, (opt, backup) = trained(settings, tmp_path)
    again = copies(groups)
    if reordered:
        again.groups = dict(reversed(again.groups.items()))
    resumed = create(again, config, backup)
    run(opt, groups, 2, start=3)
    run(resumed, again, 2, start=3)
    assert caplog.text == ""
    if settings.optimizer == "PRODIGY" and reordered:
        # Sums over parameters in another order; fp64.
        assert float(resumed.param_groups[0]["d"]) == pytest.approx(float(opt.param_groups[0]["d"]), rel=1e-12)
        return
    for name, params in groups.groups.items():
        for p, q in zip(params, again.groups[name], strict=True):
            assert same_bits(p.detach(), q.detach())
            check_states(opt.state[p], resumed.state[q])


@all_optimizers
def test_groups_may_come_and_go(settings, tmp_path, caplog):
    groups, config, (opt, backup) = trained(settings, tmp_path)
    new = make_params(((3, 3), (4,)), seed=2)
    again = Groups({"lora": new, "te": copies(groups).groups["te"]}, groups.display)
    resumed = create(again, config, backup)
    assert all(not resumed.state[p] for p in new)
    for p, q in zip(groups.groups["te"], again.groups["te"], strict=True):
        check_states(opt.state[p], resumed.state[q])
    assert len(caplog.records) == 1
    assert "'lora" in caplog.text
    assert "is not in the backup and begins anew" in caplog.text
    for key in resumed.run_state:  # the estimate is of all groups, also of those that are new
        assert len({float(group[key]) for group in [*resumed.param_groups, opt.param_groups[0]]}) == 1
    run(resumed, again, 2, start=3)


def test_prodigy_does_not_begin_again(tmp_path):
    groups, config, (opt, backup) = trained(CONFIGS[6], tmp_path)
    assert float(opt.param_groups[0]["d"]) > 1e-3
    config.optimizer.d_coef = 0.5
    resumed = create(copies(groups), config, backup)
    for key in ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k"):
        assert float(resumed.param_groups[1][key]) == float(opt.param_groups[1][key])
    assert resumed.param_groups[0]["d_coef"] == 0.5
    config.optimizer.d_coef = None


@pytest.mark.parametrize("new", ["LION", "SGD", "CAME", "PRODIGY", "ADAM"])
def test_another_optimizers_states_are_not_taken_over(new, tmp_path, caplog):
    groups, _, (_, backup) = trained(CONFIGS[0], tmp_path)
    resumed = create(copies(groups), Config(OptimizerConfig(new)), backup)
    assert not any(resumed.state.values())
    assert len(caplog.records) == 1
    assert "was trained with ADAMW and begins anew" in caplog.text


def test_came_goes_on_from_its_8bit_version(tmp_path):
    groups, config, (opt, backup) = trained(CONFIGS[3], tmp_path)
    backup["param_group_optimizer_mapping"] = ["CAME_8BIT"] * 2
    resumed = create(again := copies(groups), config, backup)
    assert same_bits(resumed.state[again.groups["te"][0]]["exp_avg"], opt.state[groups.groups["te"][0]]["exp_avg"])


def test_settings_and_rates_of_the_resumed_run_win(tmp_path):
    groups, config, (_, backup) = trained(OptimizerConfig("ADAMW", beta1=0.5, amsgrad=True), tmp_path)
    config = Config(OptimizerConfig("ADAMW", beta1=0.7), 5e-5)
    resumed = create(again := copies(groups), config, backup)
    group = resumed.param_groups[1]
    assert (group["lr"], group["initial_lr"], group["betas"], group["amsgrad"]) == (5e-5, 5e-5, (0.7, 0.999), False)
    assert group["name"] == "encoder"
    assert set(resumed.state[again.groups["te"][0]]) == {"step", "exp_avg", "exp_avg_sq", "stream"}
    run(resumed, again, 1)


def test_a_group_of_another_size_is_refused(tmp_path):
    groups, config, (_, backup) = trained(CONFIGS[0], tmp_path)
    again = copies(groups)
    again.groups["te"].pop()
    with pytest.raises(ValueError, match=r"Group 'te' has 1 parameters, and 2 in the backup"):
        create(again, config, backup)


def test_old_backups_go_by_position(tmp_path):
    groups, config, (opt, backup) = trained(CONFIGS[0], tmp_path)
    del backup["param_group_mapping"], backup["param_group_optimizer_mapping"]
    resumed = create(again := copies(groups), config, backup)
    for a, b in zip(groups.groups["te"], again.groups["te"], strict=True):
        assert same_bits(opt.state[a]["exp_avg"], resumed.state[b]["exp_avg"])


def test_lossy_states_are_told_in_one_message(tmp_path, caplog):
    params = make_params([(3, 2)] * 50)
    groups, config = Groups({"unet": params}), Config(OptimizerConfig("ADAMW"))
    other = torch.optim.AdamW(groups.parameters_for_optimizer(config))
    train(other, params, 1)
    resumed = create(copies(groups), config, save(other, groups, config, tmp_path))
    assert len(resumed.state) == 50
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "exp_avg_sq was rounded to nearest" in message
    assert "(50: parameter 0, parameter 1, parameter 2, ...)" in message


def kellers(params: list[Parameter], owned: set[int]) -> dict[str, Any]:
    """A backup of Keller Jordan's MuonWithAuxAdam on several GPUs: sorted by size, with the buffers of one process."""
    order = sorted(range(len(params)), key=lambda i: params[i].shape, reverse=True)
    state = {
        key: {"momentum_buffer": torch.full_like(params[i].detach(), float(i))}
        for key, i in enumerate(order)
        if i in owned
    }
    group = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0, "use_muon": True, "initial_lr": 0.02, "name": "unet"}
    group |= {"optim_type": "muon", "params": list(range(len(params)))}
    mapping = {"param_group_mapping": ["unet_muon"], "param_group_optimizer_mapping": ["MUON"]}
    return {"state": state, "param_groups": [group], **mapping}


@pytest.mark.parametrize("owned", [{0, 1, 2, 3}, {0, 2}, {1, 3}])
def test_kellers_backups_of_several_gpus_are_in_another_order(owned):
    params = make_params(((2, 3), (6, 2), (4, 4), (6, 2)), torch.float32)
    opt = create(Groups({"unet": params}), Config(OptimizerConfig("MUON")), kellers(params, owned))
    for i, p in enumerate(params):
        if i in owned:
            assert torch.equal(opt.state[p]["momentum_buffer"], torch.full_like(p.detach(), float(i)))
        else:
            assert "momentum_buffer" not in opt.state[p]
    train(opt, params, 1)


def test_kellers_backups_of_one_gpu_keep_their_order():
    params = make_params(((2, 3), (6, 2)), torch.float32)
    backup = kellers(params, {0, 1})
    backup["state"] = {i: {"momentum_buffer": torch.full_like(p.detach(), float(i))} for i, p in enumerate(params)}
    opt = create(Groups({"unet": params}), Config(OptimizerConfig("MUON")), backup)
    assert [float(opt.state[p]["momentum_buffer"].mean()) for p in params] == [0.0, 1.0]


def test_prodigyopts_backup_goes_on(tmp_path):
    params = make_params(((4, 3),))
    state = {0: {"step": 3, "s": torch.zeros(12), "p0": torch.tensor(0.0), "exp_avg": torch.zeros(4, 3)}}
    state[0]["exp_avg_sq"] = torch.zeros(4, 3)
    group: dict[str, Any] = {
        "lr": 1.0,
        "d": 2e-4,
        "d_max": 2e-4,
        "d_numerator": 0.5,
        "d_denom": 2.0,
        "d_hat": 1e-4,
        "k": 3,
    }
    group |= {"slice_p": 1, "params": [0]}
    mapping = {"param_group_mapping": ["lora"], "param_group_optimizer_mapping": ["PRODIGY"]}
    config = Config(OptimizerConfig("PRODIGY", decouple=True), 1.0)
    opt = create(Groups({"lora": params}), config, {"state": state, "param_groups": [group], **mapping})
    assert float(opt.param_groups[0]["d"]) == 2e-4
    assert not opt.state[params[0]]["p0"].any()
    assert isinstance(opt, subulp.Prodigy)
    train(opt, params, 2)
    assert opt.param_groups[0]["k"] == 5
