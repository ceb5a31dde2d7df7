"""Creates subulp's optimizers from OneTrainer's settings and parameter groups, and resumes its backups."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Parameter

import subulp
from subulp.optimizer import Optimizer

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """How one of OneTrainer's optimizers is made: names of settings are also those of keywords unless mapped."""

    cls: type[Optimizer]
    keywords: tuple[str, ...] = ()
    betas: tuple[str, ...] = ()
    eps: tuple[str, ...] = ()
    fallbacks: Mapping[str, Any] = {}
    """Where OneTrainer's value for a setting that is None is not the optimizer's own default."""


_COMMON = ("weight_decay", "maximize", "stochastic_rounding", "foreach", "fused", "state_dtype", "seed")
_TORCH = ("capturable", "differentiable")
_PAIR = ("beta1", "beta2")
_PRODIGY = (
    "beta3",
    "eps",
    "decouple",
    "use_bias_correction",
    "safeguard_warmup",
    "d0",
    "d_coef",
    "growth_rate",
    "slice_p",
)
_ADAFACTOR = ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init")
_CAME = Choice(subulp.CAME, (), (*_PAIR, "beta3"), ("eps", "eps2"))
_CHOICES: dict[str, Choice] = {
    "ADAM": Choice(subulp.Adam, ("eps", "amsgrad", *_TORCH), _PAIR),
    "ADAMW": Choice(subulp.AdamW, ("eps", "amsgrad", *_TORCH), _PAIR),
    "SGD": Choice(subulp.SGD, ("momentum", "dampening", "nesterov", *_TORCH)),
    "LION": Choice(subulp.Lion, (), _PAIR),
    "SIGNSGD": Choice(subulp.SignSGD, ("momentum",)),
    "ADAFACTOR": Choice(subulp.Adafactor, _ADAFACTOR, (), ("eps", "eps2")),
    "CAME": _CAME,
    "CAME_8BIT": _CAME,
    "PRODIGY": Choice(subulp.Prodigy, _PRODIGY, _PAIR),
    # Its flag "nesterov" is False by default, and MUON does not read it: Keller Jordan's package always has it on.
    "MUON": Choice(subulp.Muon, ("momentum", "ns_steps"), (), (), {"weight_decay": 0.0}),
}

_NEUTRAL = dict.fromkeys(("weight_decay_by_lr", "split_groups", "split_groups_mean", "factored", "factored_fp32"), True)
_NEUTRAL |= dict.fromkeys(("use_stableadamw", "d_limiter", "use_schedulefree", "rms_rescaling"), True)
_NEUTRAL["stochastic_rounding"] = True
"""OneTrainer's defaults that are neither None nor False; most belong to optimizers that are not here."""

_NO_EFFECT = frozenset(("optimizer", "fused_back_pass", "fused", "foreach", "use_triton", "fsdp_in_use", "__version"))
"""Settings of the trainer, or of how a result is computed, which is the same here."""

_MUON = frozenset(("MuonWithAuxAdam", "muon_hidden_layers", "muon_adam_regex", "muon_adam_lr", "muon_adam_config"))
_MUON |= {"muon_te1_adam_lr", "muon_te2_adam_lr", "nesterov"}
_TEXT_ENCODERS = {"text_encoder": 1, "text_encoder_1": 1, "text_encoder_2": 2}
_CONFIG_INTERNALS = frozenset(("types", "nullables", "default_values", "config_version", "config_migrations"))


def create_from_onetrainer(
    parameter_group_collection: Any,
    state_dict: Mapping[str, Any] | None,
    config: Any,
    layer_key_fn: Mapping[int, str] | None = None,
) -> Optimizer:
    """:func:`create_optimizer` with the arguments of OneTrainer's ``create.create_optimizer``."""
    return create_optimizer(
        parameter_group_collection.parameters_for_optimizer(config),
        config.optimizer,
        state_dict,
        unique_names=parameter_group_collection.unique_name_mapping,
        layer_key_fn=layer_key_fn,
    )


def create_optimizer(
    groups: Sequence[dict[str, Any]],
    config: Any,
    state_dict: Mapping[str, Any] | None = None,
    *,
    unique_names: Sequence[str] | None = None,
    layer_key_fn: Mapping[int, str] | None = None,
) -> Optimizer:
    """The optimizer that ``config.optimizer`` names, over groups of ``{"name", "params", "lr", "initial_lr"}``.

    Args:
        groups: of ``NamedParameterGroupCollection.parameters_for_optimizer``.
        config: a ``TrainOptimizerConfig``, or a mapping with its keys. Settings that are None take the default; those
            that have no effect are named in one log message.
        state_dict: of a backup, in any of OneTrainer's formats. Groups that it has under their unique name, written by
            this optimizer, are resumed; others begin anew. As in OneTrainer the rates of ``groups`` win over those of the
            backup; so do the settings in ``config``. What the optimizer has learned of its step size is the backup's. What
            is not exact is logged, in one message.
        unique_names: of the groups, as in ``unique_name_mapping``; None: their names.
        layer_key_fn: for MUON, "muon" or "adam" by ``id(parameter)``. None: by dimensions. Groups with ``optim_type`` stay
            as they are.

    Raises:
        ValueError: no such optimizer, a setting is out of range, or a group has other parameters than in the backup.
    """
    settings = _settings(config)
    name = str(settings["optimizer"]).rpartition(".")[2].upper()
    if name not in _CHOICES:
        raise ValueError(f"optimizer={settings['optimizer']!r}: must be one of {', '.join(_CHOICES)}.")
    choice = _CHOICES[name]
    names = (
        [str(group.get("name", i)) for i, group in enumerate(groups)] if unique_names is None else list(unique_names)
    )
    options, unknown = _options(choice, settings)
    if name == "MUON":
        options["view"] = "auto"
        options["adam"], unknown_adam = _adam_options(settings.get("muon_adam_config"))
        unknown += unknown_adam
        groups = list(_muon_groups(groups, settings, layer_key_fn))
        names = [f"{group.get('name')}_{group['optim_type']}" for group in groups]
    if unknown:
        logger.warning("%s takes no notice of: %s.", choice.cls.__name__, ", ".join(unknown))
    if name == "ADAFACTOR" and options.setdefault("relative_step", True):
        options["lr"] = None
        groups = [{key: value for key, value in group.items() if key != "lr"} for group in groups]
    elif groups:
        options["lr"] = groups[0]["lr"]
    # With names the rounding noise of a parameter does not depend on which other groups there are.
    named = [
        {**group, "params": [(f"{unique}.{i}", p) for i, p in enumerate(group["params"])]}
        for group, unique in zip(groups, names, strict=True)
    ]
    optimizer = choice.cls(named, **options)
    if state_dict is not None:
        _resume(optimizer, state_dict, name, names)
    return optimizer


def _settings(config: Any) -> dict[str, Any]:
    given = config if isinstance(config, Mapping) else vars(config)
    settings = {key: value for key, value in given.items() if key not in _CONFIG_INTERNALS}
    # TrainOptimizerConfig.to_dict() has infinity as a string.
    return {k: float(v) if isinstance(v, str) and v.lower() in ("inf", "-inf") else v for k, v in settings.items()}


def _options(choice: Choice, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keywords, and the settings that have no effect, as text."""
    direct = (*_COMMON, *choice.keywords)
    options = {key: settings[key] for key in direct if settings.get(key) is not None}
    for keyword, parts in (("betas", choice.betas), ("eps", choice.eps)):
        given = [settings.get(part) for part in parts]
        if any(value is not None for value in given):
            # Adafactor's eps is None: which one it is depends on its semantics.
            default = inspect.signature(choice.cls).parameters[keyword].default or (1e-30, 1e-3)
            options[keyword] = tuple(d if v is None else v for v, d in zip(given, default, strict=True))
    understood = {*direct, *choice.betas, *choice.eps, *_NO_EFFECT, *(_MUON if choice.cls is subulp.Muon else ())}
    return {**choice.fallbacks, **options}, _unused(settings, understood)


def _unused(settings: Mapping[str, Any], understood: Iterable[str], prefix: str = "") -> list[str]:
    """The settings that are given, not neutral and not understood."""
    return [
        f"{prefix}{key}={value!r}"
        for key, value in settings.items()
        if key not in understood and value not in (None, False, "", {}) and value != _NEUTRAL.get(key)
    ]


def _adam_options(config: Any) -> tuple[dict[str, Any], list[str]]:
    """The settings of Muon's AdamW groups, with OneTrainer's defaults, and those that have no effect."""
    settings = {} if config is None else _settings(config)
    betas = tuple(
        default if settings.get(key) is None else settings[key] for key, default in zip(_PAIR, (0.9, 0.95), strict=True)
    )
    options = {"betas": betas, "eps": 1e-10, "weight_decay": 0.0}
    options |= {key: settings[key] for key in ("lr", "eps", "weight_decay") if settings.get(key) is not None}
    return options, _unused(settings, {*_PAIR, "lr", "eps", "weight_decay", *_NO_EFFECT}, "muon_adam_config.")


def _muon_groups(
    groups: Iterable[dict[str, Any]], settings: Mapping[str, Any], layer_keys: Mapping[int, str] | None
) -> Iterator[dict[str, Any]]:
    """Groups with ``optim_type``: each one split in two, without its frozen parameters."""
    if not settings.get("MuonWithAuxAdam"):
        layer_keys = None
    for group in groups:
        if "optim_type" in group:
            yield group
            continue
        shares: dict[str, list[Parameter]] = {"muon": [], "adam": []}
        for p in group["params"]:
            if p.requires_grad:
                hidden = p.dim() >= 2 and (layer_keys is None or layer_keys.get(id(p)) == "muon")
                shares["muon" if hidden else "adam"].append(p)
        for kind, params in shares.items():
            if params:
                rates = dict.fromkeys(("lr", "initial_lr"), _adam_rate(group, settings)) if kind == "adam" else {}
                yield {**group, "params": params, "optim_type": kind, **rates}


def _adam_rate(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    encoder = _TEXT_ENCODERS.get(str(group.get("name")).removesuffix("_lora"))
    of_adam = settings.get("muon_adam_config") or {}
    of_adam = _settings(of_adam).get("lr")
    rates = (settings.get(f"muon_te{encoder}_adam_lr"), settings.get("muon_adam_lr"), of_adam, group["lr"])
    return next(rate for rate in rates if rate is not None)


def _resume(optimizer: Optimizer, state_dict: Mapping[str, Any], name: str, names: Sequence[str]) -> None:
    fresh = [
        {key: value for key, value in group.items() if key != "params" and key not in optimizer.run_state}
        for group in optimizer.param_groups
    ]
    matched, notes = _matched(optimizer, state_dict, name, names)
    converted = subulp.convert(matched, optimizer, own_settings=True)
    optimizer.load_state_dict(converted.state_dict)
    for group, settings in zip(optimizer.param_groups, fresh, strict=True):
        group.update(settings)
    told = [*notes, *filter(None, [converted.summary()])]
    if told:
        logger.warning("Resuming: %s.", "; ".join(told))


def _matched(
    optimizer: Optimizer, state_dict: Mapping[str, Any], name: str, names: Sequence[str]
) -> tuple[Mapping[str, Any], list[str]]:
    """The backup as a state dict of the optimizer's groups: those that it has by name, others empty; and what to tell."""
    old_names = state_dict.get("param_group_mapping")
    if old_names is None:  # of an old version, whose groups are the same or it does not load
        return state_dict, []
    old_kinds = state_dict.get("param_group_optimizer_mapping") or [name] * len(old_names)
    found = zip(_numbered(old_names), old_kinds, state_dict["param_groups"], strict=True)
    known = {key: (str(kind).rpartition(".")[2].upper(), group) for key, kind, group in found}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    notes: list[str] = []
    run: dict[str, Any] = {}
    count = 0
    for group, (unique, nth) in zip(optimizer.param_groups, _numbered(names), strict=True):
        keys = list(range(count, count + len(group["params"])))
        count += len(keys)
        kind, old = known.get((unique, nth), (name, None))
        if old is None or not _same(kind, name):
            reason = "is not in the backup" if old is None else f"was trained with {kind}"
            notes.append(f"group {unique!r} {reason} and begins anew")
            groups.append({"params": keys})
            continue
        if len(old["params"]) != len(keys):
            raise ValueError(
                f"Group {unique!r} has {len(keys)} parameters, and {len(old['params'])} in the backup: resume with the "
                "layers that it was made with, or without its optimizer state."
            )
        for key, old_key in zip(keys, _old_keys(group["params"], old["params"], state_dict["state"]), strict=True):
            if old_key in state_dict["state"]:
                state[key] = state_dict["state"][old_key]
        groups.append({**old, "params": keys})
        run = run or {key: old[key] for key in optimizer.run_state if key in old}
    # An estimate is common to all groups, also to new ones.
    return {"state": state, "param_groups": [{**run, **group} for group in groups]}, notes


def _numbered(names: Iterable[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before: MUON's groups go by names for display, which may be equal."""
    names = list(names)
    return [(name, names[:i].count(name)) for i, name in enumerate(names)]


def _same(old: str, new: str) -> bool:
    """Whether one optimizer continues the states of another: CAME those of its 8-bit version, any other its own only."""
    return old == new or (old in _CHOICES and _CHOICES[old] == _CHOICES[new])


def _old_keys(params: Sequence[Parameter], keys: Sequence[int], state: Mapping[int, Any]) -> list[int]:
    """The keys of parameters in a backup.

    Keller Jordan's MuonWithAuxAdam, which OneTrainer takes on several GPUs, sorts its parameters by size, and each process
    has the momentum of some of them only.
    """
    buffers = {key: state[key]["momentum_buffer"] for key in keys if "momentum_buffer" in state.get(key, ())}
    if not buffers or any("stream" in state[key] for key in buffers):
        return list(keys)
    by_size = sorted(range(len(params)), key=lambda i: params[i].shape, reverse=True)
    ordered = dict(zip(by_size, keys, strict=True))
    orders = [list(keys), [ordered[i] for i in range(len(params))]]
    if len(buffers) < len(keys):
        orders.reverse()
    for order in orders:
        if all(buffers[key].shape == p.shape for key, p in zip(order, params, strict=True) if key in buffers):
            return order
    return list(keys)
