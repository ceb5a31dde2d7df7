"""Prodigy: against its paper, that its estimate grows in bf16, and what its sums over all parameters imply."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import everything, generator, make_params, set_grads, train
from tests.rules.prodigy_reference import ProdigyReference


def descend(p: Parameter, opt: torch.optim.Optimizer, steps: int) -> None:
    """Noisy gradients of half the squared distance from 1."""
    g = generator(0)
    for _ in range(steps):
        p.grad = (p.detach().float() - 1 + 0.1 * torch.randn(p.shape, generator=g)).to(p.dtype)
        opt.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decouple": False}, {"growth_rate": 1.5, "d_coef": 2.0}],
    ids=str,
)
def test_fp64_matches_the_paper(options):
    shapes = ((6, 5), (7,), ())
    params, reference = make_params(shapes, torch.float64), make_params(shapes, torch.float64)
    opt, other = subulp.Prodigy(params, **options), ProdigyReference(reference, **options)
    train(opt, params, 100)
    train(other, reference, 100)
    assert float(opt.param_groups[0]["d"]) > 1e-5
    # 100 steps of under 100 roundings of 2**-53, amplified by the feedback through d (a factor of 1000 is allowed).
    assert float(opt.param_groups[0]["d"]) == pytest.approx(other.d, rel=1000 * 1e4 * 2.0**-53)
    for p, q in zip((p.detach() for p in params), (q.detach() for q in reference), strict=True):
        assert (p - q).abs().max() < 1000 * 1e4 * 2.0**-53


def test_the_estimate_grows_in_bf16_as_in_fp32():
    """prodigy issue 27: in bf16 with nearest rounding p stays at p0, so d stays at d0."""
    found = {}
    for dtype, stochastic in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        p = Parameter(torch.full((1 << 14,), 0.5, dtype=dtype))
        opt = subulp.Prodigy([p], stochastic_rounding=stochastic)
        descend(p, opt, 100)
        found[dtype, stochastic] = float(opt.param_groups[0]["d"])
    exact = found[torch.float32, True]
    assert exact > 1e-3
    assert exact / 2 < found[torch.bfloat16, True] < exact * 2
    assert found[torch.bfloat16, False] < exact / 2


def test_updates_in_backward_have_the_bits_of_a_step():
    params, alone = make_params(), make_params()
    opt, other = subulp.Prodigy(params, stream=0), subulp.Prodigy(alone, stream=0)
    for step in range(4):
        set_grads(params, step)
        set_grads(alone, step)
        opt.step()
        for p in alone:
            other.step_parameter(p, other.param_groups[0])
            p.grad = None
        other.step()
    assert all(map(same_bits, everything(opt, params), everything(other, alone)))
    assert opt.param_groups[0]["d"] == other.param_groups[0]["d"]
    assert opt.param_groups[0]["k"] == other.param_groups[0]["k"] == 4


def test_groups_share_one_estimate_and_one_rate():
    params = make_params(((3,), (4,)))
    opt = subulp.Prodigy([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}])
    train(opt, params, 3)
    assert opt.param_groups[0]["d"] == opt.param_groups[1]["d"]
    opt.param_groups[1]["lr"] = 0.0  # paused
    before = params[1].detach().clone()
    train(opt, params, 2)
    assert same_bits(params[1].detach(), before)
    opt.param_groups[1]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"rates \[0.5, 1.0\].*one lr"):
        train(opt, params, 1)


def test_the_starting_point_is_kept_in_the_parameters_dtype():
    """It is a copy: more bits would be zeros, and fewer would leave a distance from the start that is none."""
    for dtype, state_dtype in ((torch.bfloat16, "fp32"), (torch.float32, "bf16")):
        (p,) = make_params(((9,),), dtype)
        start = p.detach().clone()
        opt = subulp.Prodigy([p], state_dtype=state_dtype)
        train(opt, [p], 1)
        assert same_bits(opt.state[p]["p0"], start)


def test_a_sample_takes_less_state_and_gives_a_like_estimate():
    found = {}
    for every in (1, 11):
        p = Parameter(torch.full((1 << 14,), 0.5, dtype=torch.bfloat16))
        opt = subulp.Prodigy([p], slice_p=every, stream=0)
        descend(p, opt, 100)
        found[every] = float(opt.param_groups[0]["d"])
        assert opt.state[p]["s"].numel() == math.ceil((1 << 14) / every)
    assert found[11] == pytest.approx(found[1], rel=0.1)


def test_the_estimate_survives_a_checkpoint(tmp_path):
    params, resumed = make_params(), make_params()
    opt = subulp.Prodigy(params)
    train(opt, params, 8)
    torch.save([p.detach() for p in params], tmp_path / "model.pt")
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    other = subulp.Prodigy(resumed)
    for p, q in zip(resumed, torch.load(tmp_path / "model.pt", weights_only=True), strict=True):
        p.data.copy_(q)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(opt, params, 8, start=8)
    train(other, resumed, 8, start=8)
    assert all(map(same_bits, everything(opt, params), everything(other, resumed)))
    assert opt.param_groups[0]["d"] == other.param_groups[0]["d"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d0": 0.0}, "d0=0.0"),
        ({"growth_rate": 0.5}, "growth_rate=0.5"),
        ({"slice_p": 0}, "slice_p=0"),
        ({"d_coef": -1}, "d_coef=-1"),
    ],
)
def test_misuse_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        subulp.Prodigy(make_params(), **options)
