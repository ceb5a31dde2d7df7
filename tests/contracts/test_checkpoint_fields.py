"""What load_state_dict is given by mistake, and every field of a state: one sentence each, and nothing changed."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import subulp
from tests.bits import same_bits
from tests.models import make_params, train
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def trained(spec, count: int = 3) -> tuple[Any, list[Any]]:
    params = make_params(((5, 6), (4,)))
    opt = spec.make(params)
    train(opt, params, count)
    return opt, params


def refused(opt, state: Any, error: type[Exception], match: str) -> None:
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(error, match=match):
        opt.load_state_dict(state)
    after = opt.state_dict()
    assert str(before["param_groups"]) == str(after["param_groups"])
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert same_bits(value, after["state"][key][name]) if isinstance(value, torch.Tensor) else True


@all_optimizers
def test_what_is_no_state_dict_is_told(spec):
    opt, _ = trained(spec)
    model = nn.Linear(2, 2)
    whole = {"epoch": 3, "model": model.state_dict(), "optimizer": opt.state_dict()}
    refused(opt, None, TypeError, r"got None: pass the dict")
    refused(opt, "run/optimizer.pt", TypeError, r"got 'run/optimizer.pt'.*torch\.load")
    refused(opt, [opt.state_dict()], TypeError, r"got a list")
    refused(opt, whole, ValueError, r"whole training checkpoint; pass its entry 'optimizer'")
    refused(opt, model.state_dict(), ValueError, r"model's state dict")
    refused(opt, {}, ValueError, r"no 'state'")


BAD = [
    ("step", 2.5, r"step=2\.5.*whole number"),
    ("step", -1.0, r"step=-1"),
    ("step", math.nan, r"step=nan"),
    ("step", torch.ones(2), r"step=.*one whole number"),
    ("step", "3", r"step='3'"),
    ("step", True, r"step=True"),
    ("stream", -1, r"stream=-1.*\[0, 2\*\*63\)"),
    ("stream", 2**70, r"stream=\d+"),
    ("stream", 1.5, r"stream=1\.5"),
    ("stream", "a", r"stream='a'"),
    ("stream", torch.ones(2, dtype=torch.int64), r"stream="),
]


@all_optimizers
@pytest.mark.parametrize(("field", "value", "match"), BAD, ids=lambda v: repr(v)[:30])
def test_bad_counters_and_streams_are_refused(spec, field, value, match):
    opt, _ = trained(spec)
    state = copy.deepcopy(opt.state_dict())
    state["state"][1][field] = value
    refused(opt, state, ValueError, match)


@all_optimizers
def test_states_of_integers_strings_or_none_are_refused(spec):
    opt, params = trained(spec)
    group = opt.param_groups[0]
    for index, p in enumerate(params):
        for name in (s.name for s in opt.states(group, p)):
            good = opt.state_dict()["state"][index][name]
            for bad, match in ((good.to(torch.int32), r"torch\.int32"), ("1.0", "a str"), (good[None], r"of shape")):
                state = copy.deepcopy(opt.state_dict())
                state["state"][index][name] = bad
                refused(opt, state, ValueError, rf"state '{name}'.*{match}")


@all_optimizers
def test_a_missing_state_or_count_is_refused(spec):
    opt, params = trained(spec)
    for spec_of_state in opt.states(opt.param_groups[0], params[1]):
        if spec_of_state.restarts:
            continue
        state = copy.deepcopy(opt.state_dict())
        del state["state"][1][spec_of_state.name]
        refused(opt, state, ValueError, rf"has made 3 steps and has no .*{spec_of_state.name}")
    if any(s.squared for s in opt.states(opt.param_groups[0], params[1])):
        state = copy.deepcopy(opt.state_dict())
        del state["state"][1]["step"]
        refused(opt, state, ValueError, r"has states and no step")


@all_optimizers
def test_numbers_in_any_form_load(spec):
    opt, params = trained(spec)
    state = copy.deepcopy(opt.state_dict())
    kept = [int(opt.state[p]["stream"]) for p in params]
    state["state"][0] |= {"step": 3, "stream": kept[0]}
    state["state"][1] |= {"step": np.float32(3), "stream": np.int64(kept[1])}
    opt.load_state_dict(state)
    assert [int(opt.state[p]["stream"]) for p in params] == kept
    assert [float(opt.state[p]["step"]) for p in params] == [3, 3]
    train(opt, params, 1, start=3)


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("cls", [subulp.Adafactor, subulp.CAME])
def test_adams_checkpoint_says_whose_it_is(theirs, cls):
    """It failed with an error about eps being a float."""
    params, own = make_params(((5, 6),)), make_params(((5, 6),))
    other = theirs(params)
    train(other, params, 2)
    opt = cls(own, lr=1e-3)
    refused(opt, other.state_dict(), TypeError, rf"looks like one of Adam or AdamW, this optimizer is {cls.__name__}")


def test_a_string_for_a_number_says_which():
    opt, _ = trained(SPECS[0])
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["betas"] = ("0.9", 0.99)
    refused(opt, state, TypeError, r"betas\[0\]='0\.9' is a str.*param group 0 of the checkpoint")
