"""Every keyword of every optimizer has a check, and every value is checked before anything trains."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from subulp.options import DEFAULTS
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)

UNCHECKED = {"foreach", "fused"}
"""Ignored, whatever they are."""

ELSEWHERE = {"state_dtype", "stochastic_rounding", "grouping", "adam"}
"""Checked where the optimizer's states are known."""

NONSENSE: tuple[Any, ...] = ("false", object(), [object()], b"1")


def keywords(cls: type) -> list[str]:
    own = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [name for name in (*own, *DEFAULTS) if name != "params"]


@all_optimizers
def test_every_keyword_has_a_check(spec):
    assert set(keywords(spec.cls)) - UNCHECKED - ELSEWHERE <= set(spec.cls._checks)
    assert set(spec.cls.hyperparameters) <= set(keywords(spec.cls))


@all_optimizers
def test_nonsense_is_refused_by_name(spec):
    """``amsgrad="false"`` turned amsgrad on."""
    for name in set(keywords(spec.cls)) - UNCHECKED:
        for value in NONSENSE:
            with pytest.raises((TypeError, ValueError), match=name):
                spec.make([Parameter(torch.ones(3, 3))], **{name: value})


def test_numbers_of_prodigy_and_functions_say_the_rule():
    p = Parameter(torch.ones(3))
    for value in ("x", None, "2"):
        with pytest.raises(TypeError, match=r"growth_rate=.*number"):
            subulp.Prodigy([p], growth_rate=value)
    with pytest.raises(TypeError, match=r"x is a list: pass a tensor"):
        subulp.round_stochastic([1.0], torch.bfloat16, seed=0)
    with pytest.raises(TypeError, match=r"is a float: pass a tensor"):
        subulp.copy_stochastic_(torch.zeros(1), 1.0, seed=0)


def test_a_key_that_is_nearly_a_name_is_told_once_and_others_pass(recwarn):
    a, b = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match=r"'weight_decy' \(param group 1\) has no effect: did you mean 'weight_decay'"):
        opt = subulp.AdamW([{"params": [a]}, {"params": [b], "weight_decy": 0.0}])
    assert opt.param_groups[1]["weight_decy"] == 0.0
    # What trainers and schedulers put into groups.
    names = (
        "name",
        "initial_lr",
        "lr_scale",
        "optim_type",
        "eps2",
        "beta1",
        "max_lr",
        "min_lr",
        "swa_lr",
        "layer",
        "d",
    )
    subulp.AdamW([{"params": [a], **dict.fromkeys(names, 1.0)}])
    assert not recwarn.list
