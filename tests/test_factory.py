"""Optimizers by name, with strings from command lines."""

from __future__ import annotations

import pytest
import torch

import subulp
from tests.models import make_params
from tests.specs import SPECS


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_optimizer_is_found_in_any_case(spec):
    for name in (spec.name, spec.name.lower(), spec.name.upper(), f"subulp.{spec.name}"):
        assert type(subulp.from_config(name, make_params(), **spec.defaults)) is spec.cls


def test_strings_are_what_they_spell():
    options = {
        "lr": "1e-4",
        "betas": "(0.9, 0.99)",
        "amsgrad": "true",
        "fused": "None",
        "state_dtype": "bf16",
        "seed": "7",
    }
    group = subulp.from_config("adam-w", make_params(), **options).param_groups[0]
    assert (group["lr"], group["betas"], group["amsgrad"], group["fused"]) == (1e-4, (0.9, 0.99), True, None)
    assert (group["state_dtype"], group["seed"]) == ("bf16", 7)
    assert subulp.from_config("Adafactor", make_params(), lr="none").param_groups[0]["lr"] is None
    assert subulp.from_config("sgd", make_params(), lr=torch.tensor(0.5)).param_groups[0]["lr"] == 0.5


def test_unknown_names_and_keywords_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no optimizer 'adamm'.*Adam"):
        subulp.from_config("adamm", make_params())
    with pytest.raises(ValueError, match=r"no optimizer 'xyz'.*AdamW.*SignSGD"):
        subulp.from_config("xyz", make_params())
    with pytest.raises(TypeError, match=r"'beta'.*'betas'"):
        subulp.from_config("lion", make_params(), beta="0.9")
    with pytest.raises(TypeError, match="lr='fast' is a str"):
        subulp.from_config("lion", make_params(), lr="fast")


@pytest.mark.parametrize("grouping", ["auto", "true", True])
def test_muon_groups_parameters_by_itself(grouping):
    """With strings, as command lines give them; ``grouping=True`` needs no quotes in sd-scripts, which reads literals."""
    named = [("embed.weight", "fc.weight", "fc.bias"), make_params(((6, 4), (4, 4), (4,)))]
    options = {"lr": "0.02", "grouping": grouping, "adam": "{'lr': 1e-3, 'betas': (0.8, 0.9)}"}
    opt = subulp.from_config("muon", zip(*named, strict=True), **options)
    rows = [(g["use_muon"], g["param_names"], g["lr"]) for g in opt.param_groups]
    assert rows == [(True, ["fc.weight"], 0.02), (False, ["embed.weight", "fc.bias"], 1e-3)]
    assert opt.param_groups[1]["betas"] == (0.8, 0.9)
    assert len(subulp.from_config("muon", make_params(((6, 4),)), grouping="none").param_groups) == 1
