"""subulp's classes in the place of torch's, over torch's own tables: state dicts, copies, hooks, names, default dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.bits import same_bits
from tests.models import everything, make_params, set_grads, train
from tests.torch_tables import Model, all_swaps, differs

# bf16 where bits are compared: a state that went astray would change the noise as well.
BF16 = torch.bfloat16
NAMED = [(a, b) for a in (False, True) for b in (False, True)]


def given(model: Model, named: bool) -> Any:
    return model.named if named else model.params


def equal(a: Any, b: Any) -> bool:
    """Equal keys and values, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


@all_swaps
@pytest.mark.parametrize("named", NAMED, ids=str)
def test_a_loaded_optimizer_continues_with_the_same_bits(swap, named):
    for description, kwargs in swap.flagged() if named == (False, False) else swap.inputs():
        model, other_model = Model(swap.matrices, BF16), Model(swap.matrices, BF16)
        opt = swap.make(given(model, named[0]), **kwargs)
        model.train(opt, 2)
        with torch.no_grad():
            other_model.weight.copy_(model.weight)
            other_model.bias.copy_(model.bias)
        other = swap.make(given(other_model, named[1]), **copy.deepcopy(kwargs))
        saved = opt.state_dict()
        kept = copy.deepcopy(saved)
        other.load_state_dict(saved)
        names = other.state_dict()["param_groups"][0].get("param_names")
        assert names == ([n for n, _ in model.named] if any(named) else None), description
        model.train(opt, 2)
        other_model.train(other, 2)
        assert all(map(same_bits, model.params, other_model.params)), description
        first, second = without_names(opt.state_dict()), without_names(other.state_dict())
        assert equal(first, second), description
        assert equal(kept["param_groups"], saved["param_groups"]), description
        # pytorch issue 36831: repeated parameters have one representation.
        other.param_groups.extend(other.param_groups)
        assert equal(first["param_groups"][-1], without_names(other.state_dict())["param_groups"][-1]), description


@all_swaps
def test_state_dicts_survive_files(swap):
    for description, kwargs in swap.inputs():
        for named in (False, True):
            model = Model(swap.matrices, BF16)
            opt = swap.make(given(model, named), **kwargs)
            model.train(opt, 2)
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            for weights_only in (True, False):
                file.seek(0)
                assert equal(torch.load(file, weights_only=weights_only), opt.state_dict()), description


@all_swaps
def test_older_state_dicts_load(swap):
    """Without the keywords that torch's class got later, and with counters that are numbers."""
    flags = swap.later_flags()
    for description, kwargs in swap.flagged():
        model, other_model = Model(swap.matrices), Model(swap.matrices)
        opt = swap.make(model.params, **kwargs)
        model.train(opt, 3)
        old = copy.deepcopy(opt.state_dict())
        for group in old["param_groups"]:
            for flag in flags:
                group.pop(flag, None)
        for entry in old["state"].values():
            entry["step"] = float(entry["step"])
        other_kwargs = copy.deepcopy(kwargs)
        with torch.no_grad():
            other_model.weight.copy_(model.weight)
            other_model.bias.copy_(model.bias)
        other = swap.make(other_model.params, **other_kwargs)
        other.load_state_dict(old)
        model.train(opt, 2)
        other_model.train(other, 2)
        assert equal(opt.state_dict()["state"], other.state_dict()["state"]), description
        assert all(map(same_bits, model.params, other_model.params)), description


@all_swaps
def test_state_dicts_go_to_torch_and_back(swap):
    """Training that changes classes in the middle follows torch's."""
    for description, kwargs in swap.inputs():
        models = [Model(swap.matrices, torch.float64) for _ in range(3)]
        ours, theirs = swap.pair(models[0].params, models[1].params, kwargs)
        models[0].train(ours, 3)
        models[1].train(theirs, 3)
        moved = swap.make(models[2].params, **kwargs)
        moved.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            for p, q in zip(models[2].params, models[1].params, strict=True):
                p.copy_(q)
        if not differs("state names", swap.name):
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch's loading does not copy tensors
        for model, opt in zip(models, (ours, theirs, moved), strict=True):
            model.train(opt, 3)
        for p, *others in zip(*(model.params for model in models), strict=True):
            # As in test_torch_tables.tolerance, for 6 steps; Muon's iteration is bf16.
            limit = 6 * 0.01 * 2**0.5 * 7 * 4 * 2.0**-8 if swap.matrices else 6 * 8 * 8 * 2.0**-52
            assert all((p - q).abs().max() < limit for q in others), description


@all_swaps
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_all_attributes_and_continue(swap, way):
    def public(opt: Any) -> set[str]:
        return {name for name in vars(opt) if not name.startswith("_")}

    for description, kwargs in swap.inputs():
        params = make_params(((3, 4), (5, 2)), BF16)
        opt = swap.make(params, **kwargs)
        train(opt, params, 2)
        pair = (params, opt)
        copies, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
        assert public(opt) == public(other), description
        train(opt, params, 2, start=2)
        train(other, copies, 2, start=2)
        assert all(map(same_bits, everything(opt, params), everything(other, copies))), description


@all_swaps
def test_step_hooks_run_around_every_step_and_can_be_removed(swap):
    for description, kwargs in swap.flagged():
        params = make_params(((2, 2),), torch.float32)
        opts = swap.make(params, **kwargs), swap.theirs(params)
        calls: list[str] = []

        def note(word, calls=calls):
            return lambda *_: calls.append(word)

        handles = [
            register_optimizer_step_pre_hook(note("global pre")),
            register_optimizer_step_post_hook(note("global post")),
        ]
        try:
            for opt in opts:
                handles += [opt.register_step_pre_hook(note("pre")), opt.register_step_post_hook(note("post"))]
            for opt in opts:
                set_grads(params, 0)
                opt.step()
        finally:
            for handle in handles:
                handle.remove()
        opts[0].step()
        assert calls == ["global pre", "pre", "post", "global post"] * 2, description


@all_swaps
def test_a_step_pre_hook_replaces_arguments(swap):
    params = make_params(((2, 2),), torch.float32)
    opt = swap.make(params)
    opt.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 2.5), {}))
    assert opt.step(lambda: 1.0) == 2.5


@all_swaps
def test_state_dict_hooks(swap):
    params = make_params(((2, 2),), torch.float32)
    opt = swap.make(params)
    train(opt, params, 1)

    def mark(optimizer):
        optimizer.state["mark"] = 1

    def unmark(optimizer, state_dict):
        return {**state_dict, "marked": state_dict["state"].pop("mark", None)}

    post = opt.register_state_dict_post_hook(unmark)
    assert opt.state_dict()["marked"] is None
    pre = opt.register_state_dict_pre_hook(mark)
    assert opt.state_dict()["marked"] == 1
    post.remove()
    assert opt.state_dict()["state"]["mark"] == 1
    pre.remove()


@all_swaps
def test_load_state_dict_hooks(swap):
    params = make_params(((2, 2),), torch.float32)
    opt = swap.make(params, lr=1e-2)
    train(opt, params, 1)
    saved = opt.state_dict()
    seen: list[float] = []

    def in_place(_, state_dict):
        state_dict["param_groups"][0]["lr"] = 2e-3

    def replaced(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 3e-3
        return changed

    opt.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.param_groups[0]["lr"]))
    opt.load_state_dict(saved)
    opt.register_load_state_dict_pre_hook(in_place)
    opt.load_state_dict(saved)
    opt.register_load_state_dict_pre_hook(replaced, prepend=True)
    opt.load_state_dict(saved)
    opt.register_load_state_dict_pre_hook(replaced)
    opt.load_state_dict(saved)
    assert seen == [1e-2, 2e-3, 2e-3, 3e-3]
    # torch hands its hooks a shallow copy of the caller's dict.
    assert saved["param_groups"][0]["lr"] == 2e-3
    train(opt, params, 1, start=1)


@all_swaps
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_dtype_changes_nothing(swap, default):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for description, kwargs in swap.inputs():
            results = []
            for current in (torch.float32, default):
                params = make_params(((3, 4), (5, 2)), dtype)
                torch.set_default_dtype(current)
                try:
                    opt = swap.make(params, **{**copy.deepcopy(kwargs), "foreach": True})
                    for step in range(3):
                        if step != 1:
                            set_grads(params, step)
                        opt.step()
                        opt.zero_grad()
                finally:
                    torch.set_default_dtype(torch.float32)
                results.append(everything(opt, params))
            assert all(map(same_bits, *results)), description


@all_swaps
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.float16])
def test_the_dtype_of_counters(swap, default):
    """torch's are float64 under that default dtype, and float32 under all others."""
    params, reference = make_params(((3, 4),), torch.float32), make_params(((3, 4),), torch.float32)
    torch.set_default_dtype(default)
    try:
        for opt, ps in zip(swap.pair(params, reference, {}), (params, reference), strict=True):
            ps[0].grad = torch.ones_like(ps[0])
            opt.step()
            step = opt.state[ps[0]].get("step")
            if isinstance(opt, swap.theirs):
                assert step is None or step.dtype == (torch.float64 if default == torch.float64 else torch.float32)
            else:
                assert step.dtype == torch.float64
                assert differs("step dtype", "*")
    finally:
        torch.set_default_dtype(torch.float32)
