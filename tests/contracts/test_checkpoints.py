"""Checkpoints: every bit, in a new process, from and to torch, of other versions, and damaged ones."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import subulp
from tests.bits import bits, same_bits
from tests.models import everything, make_params, set_grads, train
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)

RESUME = """
import json, sys, torch
from tests.contracts.test_checkpoints import digest
from tests.models import make_params, train
from tests.specs import SPECS
folder, results = sys.argv[1], {}
for spec in SPECS:
    saved = torch.load(f"{folder}/{spec.name}.pt", weights_only=True)
    params = make_params(seed=99)
    for p, value in zip(params, saved["params"]):
        p.data.copy_(value)
    opt = spec.make(params, lr=0.123)
    opt.load_state_dict(saved["optimizer"])
    train(opt, params, 8, start=8)
    results[spec.name] = digest(opt, params)
print(json.dumps(results))
"""


def digest(opt: Any, params: Any) -> str:
    """The bits of all parameters and states, as text."""
    return "".join(bits(t.contiguous()).view(-1).numpy().tobytes().hex() for t in everything(opt, params))


def snapshot(opt: Any) -> Any:
    return copy.deepcopy(opt.state_dict())


def same_state(a: Any, b: Any) -> bool:
    """Equal keys and values, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)


@pytest.fixture(scope="module")
def resumed_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What 16 steps give, and 8 steps, a file, a new process and 8 more."""
    folder, whole = tmp_path_factory.mktemp("checkpoints"), {}
    for spec in SPECS:
        params = make_params()
        opt = spec.make(params)
        train(opt, params, 8)
        saved = {"params": [p.detach().clone() for p in params], "optimizer": snapshot(opt)}
        torch.save(saved, folder / f"{spec.name}.pt")
        train(opt, params, 8, start=8)
        whole[spec.name] = digest(opt, params)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(folder)], cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    return whole, json.loads(done.stdout)


@all_optimizers
def test_training_resumes_in_a_new_process_bit_for_bit(spec, resumed_elsewhere):
    whole, resumed = resumed_elsewhere
    assert whole[spec.name] == resumed[spec.name]


@all_optimizers
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_continue_with_the_same_bits(spec, way):
    params = make_params()
    opt = spec.make(params)
    train(opt, params, 3)
    if way == "state_dict":
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = spec.make(copies)
        other.load_state_dict(opt.state_dict())
    elif way == "deepcopy":
        copies, other = copy.deepcopy((params, opt))
    else:
        copies, other = pickle.loads(pickle.dumps((params, opt)))
    train(opt, params, 3, start=3)
    train(other, copies, 3, start=3)
    assert all(map(same_bits, everything(opt, params), everything(other, copies)))


@all_optimizers
def test_a_loaded_state_shares_no_memory_with_the_state_dict(spec):
    params = make_params()
    opt = spec.make(params)
    train(opt, params, 2)
    saved = snapshot(opt)
    before = copy.deepcopy(saved)
    other_params = make_params()
    other = spec.make(other_params)
    other.load_state_dict(saved)
    train(other, other_params, 2)
    assert same_state(saved["state"], before["state"])


@pytest.mark.parametrize(
    "state_dtype",
    ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow), {"exp_avg": "bf16", "exp_avg_sq": "fp32"}],
    ids=str,
)
def test_dtypes_of_states_survive(state_dtype):
    params, others = make_params(), make_params()
    opt, other = subulp.AdamW(params, state_dtype=state_dtype), subulp.AdamW(others, state_dtype=state_dtype)
    train(opt, params, 2)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same_state(opt.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (subulp.AdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
        (subulp.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        (subulp.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
def test_checkpoints_cross_to_torch_and_back(ours, theirs, options):
    """In fp32 both formulas agree to rounding, so either may take over from the other."""
    params, reference = make_params(dtype=torch.float32), make_params(dtype=torch.float32)
    opt, other = ours(params, **options), theirs(reference, **options)
    train(opt, params, 4)
    train(other, reference, 4)
    mine, yours = snapshot(opt), copy.deepcopy(other.state_dict())
    opt.load_state_dict(yours)
    other.load_state_dict(mine)
    train(opt, params, 4, start=4)
    train(other, reference, 4, start=4)
    for p, q in zip(params, reference, strict=True):
        # Eight steps of about 1e-2 that are right to 32 roundings, and a rounding of the weight in each.
        assert p.numel() == 0 or (p - q).detach().abs().max() < 8 * (0.05 * 32 + q.detach().abs().max()) * 2.0**-24
    assert float(opt.state[params[0]]["step"]) in (8.0, 5.0)  # torch's SGD counts no steps


@all_optimizers
def test_a_checkpoint_of_another_version_loads(spec):
    """Groups may lack options that are new, and have some that are gone; states may have more than we know."""
    params, others = make_params(), make_params()
    opt = spec.make(params)
    train(opt, params, 2)
    saved = snapshot(opt)
    for group in saved["param_groups"]:
        for key in ("seed", "backend", "state_dtype", "weight_residual", "stochastic_rounding"):
            del group[key]
        group["some_option_of_2031"] = [1, 2]
    saved["format_of_2031"] = 7
    for entry in saved["state"].values():
        entry["future"] = torch.ones(3, dtype=torch.int64)
    other = spec.make(others, seed=5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["seed"] == 5
    assert other.param_groups[0]["some_option_of_2031"] == [1, 2]
    assert other.state[others[0]]["future"].dtype == torch.int64
    train(other, others, 1)


def damage(saved: Any, how: str) -> None:
    entry = next(iter(saved["state"].values()))
    name = next(k for k, v in entry.items() if isinstance(v, torch.Tensor) and v.dim())
    if how == "no state":
        del saved["state"]
    elif how == "no groups":
        del saved["param_groups"]
    elif how == "other model":
        saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][:-1]
    elif how == "shape":
        entry[name] = torch.zeros(2, 3, 4)
    elif how == "text":
        entry[name] = "a tensor"
    elif how == "step":
        entry["step"] = torch.tensor(-1.0)
    elif how == "lr":
        saved["param_groups"][0]["lr"] = -1.0
    else:
        saved["param_groups"][0]["seed"] = "seven"


@all_optimizers
@pytest.mark.parametrize("how", ["no state", "no groups", "other model", "shape", "text", "step", "lr", "seed"])
def test_a_damaged_checkpoint_changes_nothing(spec, how):
    params = make_params()
    opt = spec.make(params)
    train(opt, params, 2)
    saved = snapshot(opt)
    damage(saved, how)
    before = snapshot(opt)
    with pytest.raises((ValueError, TypeError)):
        opt.load_state_dict(saved)
    assert same_state(before, opt.state_dict())
    set_grads(params, 2)
    opt.step()


@all_optimizers
def test_hooks_of_state_dicts_see_plain_tensors(spec):
    params, others = make_params(), make_params()
    opt, other = spec.make(params), spec.make(others)
    train(opt, params, 1)
    seen: list[Any] = []
    opt.register_state_dict_post_hook(lambda o, sd: seen.append(sd))
    other.register_load_state_dict_pre_hook(lambda o, sd: seen.append(sd))
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state_dict()))
    other.load_state_dict(opt.state_dict())
    assert len(seen) == 3
    for state_dict in seen:
        values = [v for entry in state_dict["state"].values() for v in entry.values()]
        assert all(isinstance(v, (torch.Tensor, int, float)) for v in values)


@all_optimizers
def test_an_empty_state_dict_loads(spec):
    """Accelerate loads the state dict of a new optimizer into itself."""
    params = make_params()
    opt = spec.make(params)
    opt.load_state_dict(opt.state_dict())
    train(opt, params, 1)


def test_adafactor_continues_from_torch():
    """Its factors have other names there, and keep the averaged dimension."""
    params, reference = (make_params(((6, 5), (3, 4, 5), (7,)), torch.float32) for _ in range(2))
    other = torch.optim.Adafactor(reference, lr=1e-2)
    train(other, reference, 4)
    for p, q in zip(params, reference, strict=True):
        p.data.copy_(q.data)
    opt = subulp.Adafactor(params, lr=1e-2, semantics="torch")
    opt.load_state_dict(copy.deepcopy(other.state_dict()))
    for p, q in zip(params, reference, strict=True):
        mine, theirs = opt.state[p], other.state[q]
        if p.dim() > 1:
            assert torch.equal(mine["exp_avg_sq_row"], theirs["row_var"].squeeze(-1))
            assert torch.equal(mine["exp_avg_sq_col"], theirs["col_var"].squeeze(-2))
        else:
            assert torch.equal(mine["exp_avg_sq"], theirs["variance"])
        assert "row_var" not in mine
    train(opt, params, 4, start=4)
    train(other, reference, 4, start=4)
    for p, q in zip(params, reference, strict=True):
        # Four steps of about 1e-2 * max(1, RMS) that are right to 64 roundings of fp32, and a rounding of the weight in each.
        assert (p - q).detach().abs().max() < 4 * (0.05 * 64 + q.detach().abs().max()) * 2.0**-24


def test_amsgrad_can_be_turned_on_in_the_middle():
    params, others = make_params(), make_params()
    opt, other = subulp.AdamW(params), subulp.AdamW(others, amsgrad=True)
    train(opt, params, 2)
    saved = snapshot(opt)
    for group in saved["param_groups"]:
        del group["amsgrad"]
    other.load_state_dict(saved)
    for p, q in zip(params, others, strict=True):
        assert same_bits(other.state[q]["max_exp_avg_sq"], opt.state[p]["exp_avg_sq"])


@pytest.mark.parametrize(("saver", "loader"), [("Lion", "AdamW"), ("SGD", "Adam")])
def test_a_checkpoint_of_another_optimizer_is_refused_and_can_be_converted(saver, loader):
    params, others = make_params(((6, 5),)), make_params(((6, 5),))
    opt, other = getattr(subulp, saver)(params), getattr(subulp, loader)(others)
    train(opt, params, 2)
    with pytest.raises(
        ValueError, match=rf"has made 2 steps and has no .*exp_avg_sq.*looks like one of {saver}.*convert\(\)"
    ):
        other.load_state_dict(opt.state_dict())
    assert not other.state
    converted, notes = subulp.convert(opt.state_dict(), other)
    assert any("begin anew" in note for note in notes)
    other.load_state_dict(converted)
    train(other, others, 1)
    assert float(other.state[others[0]]["step"]) == 1
