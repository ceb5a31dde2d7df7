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
