"""What OneTrainer (23df383, 2026-08-19) hands to its optimizers: settings, parameter groups, backups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from tests.packages import load_example

adapter = load_example("onetrainer/adapter.py")

# Fields of TrainOptimizerConfig whose default is False or True; all others begin as None.
FALSE = "amsgrad capturable decouple differentiable foreach fsdp_in_use fused fused_back_pass maximize nesterov relative_step"
FALSE += " safeguard_warmup scale_parameter use_bias_correction use_triton warmup_init use_cautious MuonWithAuxAdam use_atan2"
TRUE = "stochastic_rounding weight_decay_by_lr split_groups split_groups_mean factored factored_fp32 use_stableadamw"
TRUE += " d_limiter use_schedulefree rms_rescaling"
NONE = "beta1 beta2 beta3 eps eps2 weight_decay momentum dampening clip_threshold decay_rate d0 d_coef growth_rate slice_p k"
NONE += (
    " min_8bit_size quant_block_size ns_steps muon_hidden_layers muon_adam_lr muon_te1_adam_lr muon_te2_adam_lr alpha"
)


class OptimizerConfig:
    """Attribute access and ``to_dict()``, as TrainOptimizerConfig; not a mapping."""

    optimizer: str
    d_coef: float | None

    def __init__(self, optimizer: str, **settings: Any) -> None:
        fields: dict[str, Any] = {"optimizer": optimizer, "muon_adam_config": {}}
        for names, value in ((FALSE, False), (TRUE, True), (NONE, None)):
            fields |= dict.fromkeys(names.split(), value)
        assert settings.keys() <= fields.keys(), settings
        self.config_version = 0
        self.config_migrations: dict[int, Any] = {}
        self.types = {name: type(value) for name, value in fields.items()}
        self.nullables = {name: value is None for name, value in fields.items()}
        self.default_values = fields
        for name, value in (fields | settings).items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.types}
        return {"__version": 0} | {k: str(v) if v in (float("inf"),) else v for k, v in fields.items()}


class Config:
    """The part of TrainConfig that ``create_optimizer`` reads."""

    def __init__(self, optimizer: OptimizerConfig, learning_rate: float = 1e-2) -> None:
        self.optimizer = optimizer
        self.learning_rate = learning_rate


class Groups:
    """NamedParameterGroupCollection: groups by unique name, shown under another name if there is one."""

    def __init__(self, groups: dict[str, list[Parameter]], display: dict[str, str] | None = None) -> None:
        self.groups = groups
        self.display = display or {}

    def parameters_for_optimizer(self, config: Config) -> list[dict[str, Any]]:
        rate = config.learning_rate
        return [
            {"name": self.display.get(name, name), "params": list(params), "lr": rate, "initial_lr": rate}
            for name, params in self.groups.items()
        ]

    @property
    def unique_name_mapping(self) -> list[str]:
        return list(self.groups)


def create(groups: Groups, config: Config, state_dict: Any = None, layer_keys: dict[int, str] | None = None) -> Any:
    return adapter.create_from_onetrainer(groups, state_dict, config, layer_keys)


def save(optimizer: Any, groups: Groups, config: Config, path: Path) -> Any:
    """The optimizer's part of a backup, written and read: InternalModelSaverMixin, InternalModelLoaderMixin."""
    state = optimizer.state_dict()
    if any("optim_type" in group for group in optimizer.param_groups):
        names = [f"{group.get('name')}_{group.get('optim_type', 'unknown')}" for group in optimizer.param_groups]
    else:
        names = groups.unique_name_mapping
    state["param_group_mapping"] = names
    state["param_group_optimizer_mapping"] = [str(config.optimizer.optimizer) for _ in names]
    torch.save(state, path / "optimizer.pt")
    return torch.load(path / "optimizer.pt", weights_only=True)
