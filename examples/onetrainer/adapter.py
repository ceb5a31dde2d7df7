"""Creates subulp's optimizers from OneTrainer's optimizer settings, and resumes its backups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import subulp
from subulp.optimizer import Optimizer

logger = logging.getLogger(__name__)

# Setting of OneTrainer's TrainOptimizerConfig -> keyword; None in the settings means the optimizer's own default.
_COMMON = {"weight_decay": "weight_decay", "maximize": "maximize", "stochastic_rounding": "stochastic_rounding"}
_COMMON |= {"foreach": "foreach", "fused": "fused", "state_dtype": "state_dtype", "seed": "seed"}
_SINGLE: dict[str, tuple[type[Optimizer], dict[str, str]]] = {
    "ADAM": (subulp.Adam, {"eps": "eps", "amsgrad": "amsgrad"}),
    "ADAMW": (subulp.AdamW, {"eps": "eps", "amsgrad": "amsgrad"}),
    "SGD": (subulp.SGD, {"momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov"}),
    "LION": (subulp.Lion, {}),
    "SIGNSGD": (subulp.SignSGD, {"momentum": "momentum"}),
    "ADAFACTOR": (
        subulp.Adafactor,
        {
            name: name
            for name in ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init")
        },
    ),
    "CAME": (subulp.CAME, {}),
    "CAME_8BIT": (subulp.CAME, {}),
    "PRODIGY": (
        subulp.Prodigy,
        {
            name: name
            for name in (
                "eps",
                "beta3",
                "decouple",
                "use_bias_correction",
                "safeguard_warmup",
                "d0",
                "d_coef",
                "slice_p",
            )
        },
    ),
    "MUON": (subulp.Muon, {name: name for name in ("momentum", "nesterov", "ns_steps")}),
}
_BETAS = {"ADAM": 2, "ADAMW": 2, "LION": 2, "PRODIGY": 2, "CAME": 3, "CAME_8BIT": 3}
_EPS_PAIR = ("ADAFACTOR", "CAME", "CAME_8BIT")


def create_optimizer(
    groups: Sequence[dict[str, Any]], config: Mapping[str, Any], state_dict: Mapping[str, Any] | None = None
) -> Optimizer:
    """The optimizer that ``config["optimizer"]`` names, over groups of ``{"name", "params", "lr", "initial_lr"}``.

    ``state_dict``: of a backup, in any of OneTrainer's formats. As in OneTrainer the rates of ``groups`` win over those of
    the backup; so do all settings given in ``config``.

    Raises:
        ValueError: no such optimizer, or a setting is out of range.
    """
    name = str(config["optimizer"]).rpartition(".")[2].upper()
    if name not in _SINGLE:
        raise ValueError(f"optimizer={config['optimizer']!r}: must be one of {', '.join(_SINGLE)}.")
    cls, keywords = _SINGLE[name]
    options = {to: config[key] for key, to in (_COMMON | keywords).items() if config.get(key) is not None}
    if name == "ADAFACTOR" and options.get("relative_step", True):
        options["lr"] = None
    elif name in ("CAME", "CAME_8BIT"):
        options["lr"] = groups[0]["lr"]
    betas = [config.get(f"beta{i + 1}") for i in range(_BETAS.get(name, 0))]
    if betas and all(beta is not None for beta in betas):
        options["betas"] = tuple(betas)
    if name in _EPS_PAIR and config.get("eps") is not None and config.get("eps2") is not None:
        options["eps"] = (config["eps"], config["eps2"])
    optimizer = cls([_named(group) for group in groups], **options)
    if state_dict is not None:
        converted, notes = subulp.convert(state_dict, optimizer)
        for note in notes:
            logger.warning("resuming: %s", note)
        fresh = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(converted)
        for group, settings in zip(optimizer.param_groups, fresh, strict=True):
            group.update(settings)
    return optimizer


def _named(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with names for its parameters, by which their noise goes: groups may come and go between two runs."""
    names = [f"{group['name']}.{i}" for i in range(len(group["params"]))] if "name" in group else None
    return {**group, "param_names": names} if names is not None else dict(group)
