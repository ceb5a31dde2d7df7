"""Checkpoints of other optimizers: exact where they can be, and told where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import subulp
from tests.bits import same_bits
from tests.models import generator, make_params, train

SHAPE = (50, 90)  # 4500 elements: two full blocks and a part


def groups(**options: Any) -> list[dict[str, Any]]:
    return [{"params": [0], "lr": 3e-4, "name": "unet", "initial_lr": 1e-4, "unknown": 7, **options}]


def test_torch_checkpoints_keep_every_bit_and_tell_of_rounded_squares():
    params, theirs = make_params(), make_params()
    other = torch.optim.AdamW(theirs, lr=3e-4, betas=(0.8, 0.95), amsgrad=True)
    train(other, theirs, 3)
    opt = subulp.AdamW(params, amsgrad=True)
    converted, notes = subulp.convert(other.state_dict(), opt)
    opt.load_state_dict(converted)
    assert opt.param_groups[0]["lr"] == 3e-4
    assert opt.param_groups[0]["betas"] == (0.8, 0.95)
    for p, q in zip(params, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert same_bits(opt.state[p][name], other.state[q][name])
        assert float(opt.state[p]["step"]) == 3
    assert len(notes) == 2 * len(params)
    assert all("exp_avg_sq was rounded to nearest" in note for note in notes)


def test_our_own_checkpoints_come_without_notes():
    params = make_params()
    opt = subulp.AdamW(params)
    train(opt, params, 2)
    converted, notes = subulp.convert(opt.state_dict(), opt)
    assert notes == []
    opt.load_state_dict(converted)


def test_came8bit_blocks():
    """Lists of blocks of 2048: value * scale + min; a block of equal elements has scale NaN or 0."""
    (p,) = make_params((SHAPE,))
    exact = torch.randn(SHAPE, generator=generator(0))
    exact.view(-1)[2048:4096] = 0.25
    blocks = []
    for part in exact.view(-1).split(2048):
        low, scale = part.min(), (part.max() - part.min()) / 255
        blocks.append(
            {"value": ((part - low) / scale).round().nan_to_num().byte(), "scale": scale / (scale != 0), "min": low}
        )
    factors = {"exp_avg_sq_row": torch.rand(50), "exp_avg_sq_col": torch.rand(90)}
    factors |= {"exp_avg_res_row": torch.rand(50), "exp_avg_res_col": torch.rand(90)}
    theirs = {
        "state": {0: {"step": 9, "exp_avg": blocks, "RMS": torch.tensor(0.5), **factors}},
        "param_groups": groups(),
    }
    opt = subulp.CAME([p], lr=1e-4, state_dtype="fp32")
    converted, notes = subulp.convert({**theirs, "param_group_mapping": ["unet"]}, opt)
    opt.load_state_dict(converted)
    state = opt.state[p]
    assert float(state["step"]) == 9
    # Half a quantum of a range of at most 8, and the rounding of the sum.
    assert (state["exp_avg"] - exact).abs().max() < 8 / 510 + 1e-5
    assert torch.equal(state["exp_avg"].view(-1)[2048:4096], torch.full((2048,), 0.25))
    assert all(torch.equal(state[k], v) for k, v in factors.items())
    assert ["8 bits" in note for note in notes] == [True]
    assert opt.param_groups[0]["name"] == "unet"
    train(opt, [p], 1)


def test_adv_optm_int8():
    (p,) = make_params((SHAPE,))
    g = generator(1)
    m = torch.randint(-127, 128, SHAPE, generator=g).to(torch.int8)
    v = torch.randint(0, 256, SHAPE, generator=g).to(torch.uint8)
    scales = torch.tensor([0.5, 1e-3, 2.0]), torch.tensor([1e-6, 1.0, 1e-14])
    entry = {
        "step": 5,
        "factored": False,
        "exp_avg": m,
        "exp_avg_scale": scales[0],
        "exp_avg_sq": v,
        "exp_avg_sq_scale": scales[1],
    }
    opt = subulp.AdamW([p], state_dtype="fp32")
    converted, notes = subulp.convert({"state": {0: entry}, "param_groups": groups(eps=None)}, opt)
    opt.load_state_dict(converted)
    spread = [s.repeat_interleave(2048)[:4500].view(SHAPE) for s in scales]
    assert torch.equal(opt.state[p]["exp_avg"], m.float() * spread[0])
    assert torch.equal(opt.state[p]["exp_avg_sq"], v.float() * spread[1])
    assert opt.param_groups[0]["eps"] == 1e-8
    assert [note.split(":")[0] for note in notes] == ["group 0", "parameter 0", "parameter 0"]
    assert "eps stays 1e-08" in notes[0]
    del entry["exp_avg_scale"]
    with pytest.raises(ValueError, match="3 blocks of 8-bit numbers and none scales"):
        subulp.convert({"state": {0: entry}, "param_groups": groups()}, opt)


def test_what_is_missing_or_factored_is_told():
    (p,) = make_params((SHAPE,))
    opt = subulp.AdamW([p])
    factored = {"step": 3, "factored": True, "mu_v_nmf": torch.ones(75), "mv_v_nmf": torch.ones(60)}
    converted, notes = subulp.convert({"state": {0: factored}, "param_groups": groups()}, opt)
    assert converted["state"] == {0: {}}
    assert any("begin anew" in note for note in notes)
    _, notes = subulp.convert({"state": {0: {"step": 3, "exp_avg": torch.ones(SHAPE)}}, "param_groups": groups()}, opt)
    assert notes == ["parameter 0: exp_avg_sq is not in the checkpoint: all its states begin anew."]
    lion = subulp.Lion([p])
    _, notes = subulp.convert({"state": {0: {"step": 3}}, "param_groups": groups()}, lion)
    assert notes == ["parameter 0: exp_avg is not in the checkpoint and begins at zero."]


def test_other_models_are_refused():
    (p,) = make_params((SHAPE,))
    opt = subulp.AdamW([p])
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, the optimizer of \[1\]"):
        subulp.convert({"state": {}, "param_groups": [{"params": [0, 1]}]}, opt)
    with pytest.raises(ValueError, match=r"exp_avg has 3 elements.*\(50, 90\)"):
        subulp.convert({"state": {0: {"step": 1, "exp_avg": torch.ones(3)}}, "param_groups": groups()}, opt)


def test_settings_that_need_each_other_are_taken_together():
    (p,) = make_params((SHAPE,))
    theirs = torch.optim.SGD(make_params((SHAPE,)), lr=0.1, momentum=0.9, nesterov=True)
    train(theirs, theirs.param_groups[0]["params"], 1)
    opt = subulp.SGD([p])
    converted, notes = subulp.convert(theirs.state_dict(), opt)
    opt.load_state_dict(converted)
    assert notes == []
    assert (opt.param_groups[0]["momentum"], opt.param_groups[0]["nesterov"]) == (0.9, True)
    # Which states there are follows the settings that are taken, not those that were.
    buffer = theirs.state[theirs.param_groups[0]["params"][0]]["momentum_buffer"]
    assert same_bits(opt.state[p]["momentum_buffer"], buffer)
    _, notes = subulp.convert({"state": {}, "param_groups": groups(momentum=-1, nesterov=True)}, subulp.SGD([p]))
    assert [note.split(": ")[1] for note in notes] == ["momentum stays 0.0", "nesterov stays False"]


def test_own_settings_stay_and_decide_which_states_there_are():
    params, theirs = make_params(), make_params()
    other = torch.optim.AdamW(theirs, lr=3e-4, betas=(0.8, 0.95), amsgrad=True)
    train(other, theirs, 2)
    opt = subulp.AdamW(params, lr=1e-5)
    converted, _ = subulp.convert(other.state_dict(), opt, own_settings=True)
    opt.load_state_dict(converted)
    group = opt.param_groups[0]
    assert (group["lr"], group["betas"], group["amsgrad"]) == (1e-5, (0.9, 0.999), False)
    assert "max_exp_avg_sq" not in opt.state[params[0]]
    assert float(opt.state[params[0]]["step"]) == 2


def prodigyopt(params: list[torch.nn.Parameter], every: int) -> dict[str, Any]:
    """What prodigyopt 1.1.2 saves after 3 steps: flat samples, and one zero for a parameter that began at zero."""
    state = {}
    for i, p in enumerate(params):
        start = p.detach().flatten()[::every].clone() if p.detach().any() else torch.tensor(0, dtype=p.dtype)
        state[i] = {"step": 3, "s": torch.randn(p.shape, generator=generator(i)).to(p.dtype).flatten()[::every]}
        state[i] |= {"p0": start, "exp_avg": torch.ones_like(p.detach()), "exp_avg_sq": torch.ones_like(p.detach())}
    group = {"lr": 1.0, "betas": (0.9, 0.99), "beta3": None, "eps": 1e-8, "weight_decay": 0, "d0": 1e-6, "d_coef": 2.0}
    group |= {"d": 2e-4, "d_max": 3e-4, "d_numerator": 0.25, "d_denom": 40.0, "d_hat": 1e-4, "k": 3}
    group |= {"growth_rate": float("inf"), "slice_p": every, "fsdp_in_use": False, "params": list(range(len(params)))}
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("every", [1, 11])
@pytest.mark.parametrize("own_settings", [False, True])
def test_prodigyopt_continues_its_estimate_also_where_a_weight_began_at_zero(every, own_settings):
    """Every LoRA's up matrix does."""
    params = make_params(((8, 6), (5,)))
    with torch.no_grad():
        params[0].zero_()
    theirs = prodigyopt(params, every)
    opt = subulp.Prodigy(params, slice_p=every)
    with torch.no_grad():
        params[0].add_(0.5)
    converted, notes = subulp.convert(theirs, opt, own_settings=own_settings)
    opt.load_state_dict(converted)
    assert [note.split(": ")[1].split(" ")[0] for note in notes] == ["exp_avg_sq"] * 2
    assert opt.param_groups[0]["d_coef"] == (1.0 if own_settings else 2.0)
    for key in opt.run_state:
        assert float(opt.param_groups[0][key]) == theirs["param_groups"][0][key]
        assert key == "k" or opt.param_groups[0][key].dtype == torch.float64
    for i, p in enumerate(params):
        p0, s = opt.state[p]["p0"], opt.state[p]["s"]
        assert p0.shape == s.shape == ((-(-p.numel() // every),) if every > 1 else p.shape)
        assert torch.equal(p0.flatten(), theirs["state"][i]["p0"].expand(p0.numel()))
        assert torch.equal(s.flatten(), theirs["state"][i]["s"].float())
    train(opt, params, 2)
    assert opt.param_groups[0]["k"] == 5


def test_a_sample_of_prodigy_is_thinned_or_begins_anew():
    params = make_params(((8, 6), (5,)))
    opt = subulp.Prodigy(params, slice_p=4)
    theirs = prodigyopt(params, 2)
    converted, _ = subulp.convert(theirs, opt, own_settings=True)
    assert torch.equal(converted["state"][0]["s"], theirs["state"][0]["s"][::2])
    opt.load_state_dict(converted)
    train(opt, params, 1)
    opt = subulp.Prodigy(params, slice_p=3)
    converted, notes = subulp.convert(theirs, opt, own_settings=True)
    assert sum("s is of a sample of other elements" in note for note in notes) == 2
    opt.load_state_dict(converted)
    assert float(opt.param_groups[0]["d"]) == 2e-4
    train(opt, params, 1)
    del theirs["param_groups"][0]["slice_p"]
    with pytest.raises(ValueError, match="s has 24 elements"):
        subulp.convert(theirs, opt)


def came8bit_convolution(shape: tuple[int, ...], step: int) -> dict[str, Any]:
    """The entry of a weight after ``step`` steps, with moments that are those of constant gradients."""
    v = torch.rand(shape, generator=generator(2)) + 0.1
    entry: dict[str, Any] = {"step": step, "RMS": torch.tensor(0.5), "exp_avg": torch.ones(shape)}
    if len(shape) == 4 and shape[2:] == (1, 1):
        row, col = v[:, 0, 0, 0].clone(), v[0, :, 0, 0].clone()
        return entry | {
            "exp_avg_sq_row": row,
            "exp_avg_sq_col": col,
            "exp_avg_res_row": row * 2,
            "exp_avg_res_col": col * 2,
        }
    return entry | {"exp_avg_sq": v}


def test_came8bit_factors_of_a_1x1_convolution():
    shape = (6, 3, 1, 1)
    (p,) = make_params((shape,))
    theirs = came8bit_convolution(shape, 9)
    opt = subulp.CAME([p], lr=1e-4, state_dtype="fp32")
    converted, notes = subulp.convert({"state": {0: theirs}, "param_groups": groups()}, opt)
    opt.load_state_dict(converted)
    assert notes == []
    for name, factor in (("exp_avg_sq", 1), ("exp_avg_res", 2)):
        row, col = theirs["exp_avg_sq_row"], theirs["exp_avg_sq_col"]
        v = factor * row[:, None] * col / row.mean()
        assert torch.allclose(opt.state[p][f"{name}_row"], v[..., None], rtol=1e-6)
        assert torch.allclose(opt.state[p][f"{name}_col"], v[..., None], rtol=1e-6)
    train(opt, [p], 1)


@pytest.mark.parametrize("shape", [(6, 3, 3, 3), (4, 5, 6)])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_came8bit_moments_that_it_does_not_factor(shape, bias_correction):
    """The first update after loading is of the size of CAME8bit's, not a hundred times as large."""
    (p,) = make_params((shape,), torch.float32)
    before = p.detach().clone()
    theirs = came8bit_convolution(shape, 500)
    opt = subulp.CAME([p], lr=1e-2, bias_correction=bias_correction)
    converted, notes = subulp.convert({"state": {0: theirs}, "param_groups": groups()}, opt)
    opt.load_state_dict(converted)
    opt.param_groups[0]["lr"] = 1e-2
    assert len(notes) == 1
    assert "exp_avg_res begins at 1" in notes[0]
    assert torch.allclose(opt.state[p]["exp_avg_sq_row"], theirs["exp_avg_sq"].mean(-1))
    assert torch.allclose(opt.state[p]["exp_avg_sq_col"], theirs["exp_avg_sq"].mean(-2))
    assert torch.equal(opt.state[p]["exp_avg"], theirs["exp_avg"])
    p.grad = torch.zeros_like(p)
    opt.step()
    # m' = 0.9, and the confidence is 1 but for (1 - beta3) or, corrected, its 500 steps.
    assert torch.allclose(before - p.detach(), torch.full(shape, 1e-2 * 0.9), rtol=2e-3)


@pytest.mark.parametrize(("cls", "entry"), [(subulp.Lion, {"exp_avg": torch.ones(SHAPE)})], ids=["lion-pytorch"])
def test_packages_that_count_no_steps(cls, entry):
    (p,) = make_params((SHAPE,))
    opt = cls([p])
    converted, notes = subulp.convert({"state": {0: entry}, "param_groups": groups(betas=(0.8, 0.9))}, opt)
    opt.load_state_dict(converted)
    assert notes == []
    assert same_bits(opt.state[p]["exp_avg"], torch.ones(SHAPE, dtype=torch.bfloat16))
    train(opt, [p], 1)


def test_kellers_muon_with_adam_groups():
    params = make_params(((4, 3), (5,)))
    moments = {"exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}
    state: dict[int, dict[str, Any]] = {0: {"momentum_buffer": torch.ones(4, 3)}, 1: {"step": 4, **moments}}
    theirs = [{"params": [0], "lr": 0.02, "momentum": 0.9, "weight_decay": 0, "use_muon": True}]
    theirs += [{"params": [1], "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-10, "weight_decay": 0, "use_muon": False}]
    opt = subulp.Muon([{"params": [params[0]]}, {"params": [params[1]], "use_muon": False}], state_dtype="fp32")
    converted, notes = subulp.convert({"state": state, "param_groups": theirs}, opt)
    opt.load_state_dict(converted)
    assert notes == []
    assert opt.param_groups[0]["momentum"] == 0.9
    assert (opt.param_groups[1]["betas"], opt.param_groups[1]["eps"]) == ((0.8, 0.9), 1e-10)
    assert torch.equal(opt.state[params[0]]["momentum_buffer"], torch.ones(4, 3))
    assert float(opt.state[params[1]]["step"]) == 4
    train(opt, params, 1)


def test_the_summary_is_one_line_for_each_kind():
    params, theirs = make_params(), make_params()
    other = torch.optim.AdamW(theirs)
    train(other, theirs, 1)
    converted = subulp.convert(other.state_dict(), subulp.AdamW(params))
    assert len(converted.notes) == len(params)
    assert converted.summary(2) == (
        "exp_avg_sq was rounded to nearest and may be too large. It falls from now on "
        f"({len(params)}: parameter 0, parameter 1, ...)"
    )
    assert converted._replace(notes=[]).summary() == ""
