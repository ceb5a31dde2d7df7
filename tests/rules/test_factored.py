"""Adafactor and CAME: against their references, and what stochastic rounding must preserve in the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import generator, make_params, set_grads, train
from tests.rules.came_reference import CAMEReference
from tests.specs import others_slow

SHAPES = ((64, 33), (7,), (4, 6, 5), (8, 3, 3, 3), (1, 1))
EPS32 = 2.0**-24


def largest_excess(params: list[Parameter], reference: list[Parameter], steps: int, moved: float) -> float:
    """The largest deviation, relative to what rounding allows.

    Each step rounds the weight once in each implementation. What it adds (``moved`` in all steps together, at most) comes
    from a chain of under 32 roundings, a pairwise mean over up to 2**12 elements (12 roundings) and sums of the reference
    in fp32, each 2**-24 relative: 64 of them are allowed.
    """
    worst = 0.0
    for p, q in zip((p.detach() for p in params), (q.detach() for q in reference), strict=True):
        bound = 2 * steps * EPS32 * q.abs().max() + 64 * EPS32 * moved
        worst = max(worst, float((p - q).abs().max() / bound))
    return worst


TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    {"beta1": 0.9, "weight_decay": 0.1},
    {"warmup_init": True, "clip_threshold": 0.5},
    {"lr": 1e-3, "relative_step": False, "decay_rate": -0.5, "eps": (1e-20, 1e-2)},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_fp32_matches_transformers(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers.optimization", reason="pip install transformers")
    params, reference = make_params(SHAPES, torch.float32), make_params(SHAPES, torch.float32)
    train(subulp.Adafactor(params, **options), params, 100)
    train(transformers.Adafactor(reference, **options), reference, 100)
    # Steps are at most 0.01 times the largest root mean square (about 2) times the largest of u (33**0.5, since RMS is 1).
    assert largest_excess(params, reference, 100, 100 * 0.02 * 33**0.5) < 1


@pytest.mark.parametrize(
    "options",
    others_slow([{}, {"lr": 1e-3, "weight_decay": 0.1}, {"eps": (1e-3, 1e-2)}, {"maximize": True}]),
    ids=str,
)
def test_fp32_matches_torch(options: dict[str, Any]) -> None:
    params, reference = make_params(SHAPES, torch.float32), make_params(SHAPES, torch.float32)
    train(subulp.Adafactor(params, semantics="torch", **options), params, 100)
    train(torch.optim.Adafactor(reference, **options), reference, 100)
    assert largest_excess(params, reference, 100, 100 * 0.02 * 33**0.5) < 1


@pytest.mark.parametrize(
    "options", others_slow([{}, {"weight_decay": 0.1}, {"bias_correction": True, "clip_threshold": 0.5}]), ids=str
)
def test_came_in_fp64_matches_its_paper(options: dict[str, Any]) -> None:
    params, reference = make_params(SHAPES, torch.float64), make_params(SHAPES, torch.float64)
    train(subulp.CAME(params, lr=1e-3, **options), params, 100)
    train(CAMEReference(reference, lr=1e-3, **options), reference, 100)
    # The factors are kept in fp64 under fp64 parameters: 100 steps of under 64 roundings of 2**-53. The weights by which
    # CAME multiplies reach 100 in the first steps.
    for p, q in zip((p.detach() for p in params), (q.detach() for q in reference), strict=True):
        assert (p - q).abs().max() < 100 * 64 * 100 * 2.0**-53 * max(1.0, float(q.abs().max()))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: subulp.Adafactor(p, lr=1e-3, weight_decay=0.01, relative_step=False, scale_parameter=False),
        lambda p: subulp.CAME(p, lr=1e-3, weight_decay=0.01),
    ],
    ids=["Adafactor", "CAME"],
)
def test_decay_alone_follows_its_closed_form(make: Any) -> None:
    """Zero gradients: p shrinks by 1 - 1e-5 a step, a hundredth of an ulp, which rounding to nearest loses."""
    steps, count = 1000, 4096
    p = Parameter(torch.full((64, 64), 0.7, dtype=torch.bfloat16))
    opt = make([p])
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        opt.step()
    exact = float(torch.tensor(0.7).bfloat16()) * (1 - 1e-5) ** steps
    # A step's rounding error has variance q (1 - q) ulp**2 with q = 7e-6 / 2**-9 = 0.0036: 1000 steps give 3.6 ulp**2 / 1000,
    # that is sd 1.9 ulp = 0.0037 an element. Five standard errors of the mean: false alarm 6e-7.
    assert abs(float(p.detach().double().mean()) - exact) < 5 * 0.0037 / math.sqrt(count)
    assert abs(float(torch.tensor(0.7).bfloat16()) - exact) > 5 * 0.0037 / math.sqrt(count)  # nearest would fail


@pytest.mark.parametrize("cls", [subulp.Adafactor, subulp.CAME])
def test_the_mean_in_bf16_follows_fp32(cls: Any) -> None:
    """4096 columns that all get the same gradient: their mean in bf16 follows the one weight of fp32."""
    options = {"lr": 1e-4, **({"relative_step": False, "scale_parameter": False} if cls is subulp.Adafactor else {})}
    p, q = (Parameter(torch.full((2, 4096), 0.5, dtype=d)) for d in (torch.bfloat16, torch.float32))
    opts = [cls([t], **options) for t in (p, q)]
    g = generator(3)
    for _ in range(200):
        gradient = torch.randn(2, 1, generator=g).expand(2, 4096).clone()
        for t, opt in zip((p, q), opts, strict=True):
            t.grad = gradient.to(t.dtype)
            opt.step()
    assert abs(float(q.detach()[0, 0]) - 0.5) > 1e-4  # it moved, by less than an ulp of 2**-8 in most steps
    # bf16 gradients differ from fp32's by 2**-9 relative; roundings of 200 steps: sd at most sqrt(200) / 2 ulp an element.
    for row in range(2):
        error = float(p.detach()[row].double().mean() - q.detach()[row].double().mean())
        moved = 200 * options["lr"] * 4
        assert abs(error) < 5 * math.sqrt(200) / 2 * 2.0**-8 / math.sqrt(4096) + moved * 2.0**-8


@pytest.mark.parametrize("cls", [subulp.Adafactor, subulp.CAME])
def test_strided_parameters_have_the_bits_of_contiguous_ones(cls: Any) -> None:
    options = {"lr": 1e-3} if cls is subulp.CAME else {}
    plain, strided = make_params(((8, 6, 5, 5), (40, 30))), make_params(((8, 6, 5, 5), (40, 30)))
    strided[0].data = strided[0].data.contiguous(memory_format=torch.channels_last)
    strided[1].data = strided[1].data.t().contiguous().t()
    for params in (plain, strided):
        opt = cls(params, stream=0, **options)
        for step in range(3):
            set_grads(params, step)
            opt.step()
    assert all(same_bits(p.detach().contiguous(), q.detach().contiguous()) for p, q in zip(plain, strided, strict=True))


def test_factors_are_fp32_small_and_keep_falling() -> None:
    p = Parameter(torch.ones(300, 200, dtype=torch.bfloat16))
    opt = subulp.CAME([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    opt.step()
    state = opt.state[p]
    shapes = {k: (tuple(v.shape), v.dtype) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    assert shapes == {
        "exp_avg": ((300, 200), torch.bfloat16),
        "exp_avg_sq_row": ((300,), torch.float32),
        "exp_avg_sq_col": ((200,), torch.float32),
        "exp_avg_res_row": ((300,), torch.float32),
        "exp_avg_res_col": ((200,), torch.float32),
    }
    before = state["exp_avg_sq_row"].clone()
    p.grad = torch.zeros_like(p)
    for _ in range(10):
        opt.step()
    torch.testing.assert_close(state["exp_avg_sq_row"], before * 0.999**10, rtol=10 * EPS32 * 2, atol=0)


def test_with_bias_correction_cames_first_updates_are_no_larger_than_the_threshold() -> None:
    """CAME pull request #6: as published the first ones are 100 times as large."""
    largest = {}
    for corrected in (True, False):
        p = Parameter(torch.zeros(64, 64))
        opt = subulp.CAME([p], lr=1.0, bias_correction=corrected)
        updates = []
        for step in range(5):
            before = p.detach().clone()
            p.grad = torch.randn(64, 64, generator=generator(step))
            opt.step()
            updates.append(float((p.detach() - before).square().mean().sqrt()))
        largest[corrected] = max(updates)
    assert largest[True] <= 1.0
    assert largest[False] > 5.0


def test_the_group_is_not_written_to() -> None:
    """transformers pull request #9751: a scaled rate that is written back depends on the order of parameters."""
    params = make_params()
    opt = subulp.Adafactor(params, lr=1e-3, relative_step=False)
    before = {k: v for k, v in opt.param_groups[0].items() if k != "params"}
    train(opt, params, 2)
    assert {k: v for k, v in opt.param_groups[0].items() if k != "params"} == before


@pytest.mark.slow
def test_transformers_schedule_runs() -> None:
    transformers = pytest.importorskip("transformers.optimization", reason="pip install transformers")
    params = make_params(((5, 5), (3,)))
    opt = subulp.Adafactor(params)
    schedule = transformers.AdafactorSchedule(opt, initial_lr=0.5)
    assert schedule.get_lr() == [0.5]  # before the first step, and without state
    for step in range(3):
        set_grads(params, step)
        opt.step()
        schedule.step()
    rms = float(params[0].detach().float().square().mean().sqrt())
    (lr,) = schedule.get_lr()
    assert lr == pytest.approx(0.01 * rms, rel=0.02)  # RMS before the last step


def test_transformers_checkpoints_load() -> None:
    """Its step is an int, its RMS an int or a tensor, its states fp32."""
    p = make_params(((6, 4),))[0]
    opt = subulp.Adafactor([p], beta1=0.9)
    row, col, m = torch.rand(6), torch.rand(4), torch.randn(6, 4)
    theirs = {"step": 7, "exp_avg": m, "exp_avg_sq_row": row, "exp_avg_sq_col": col, "RMS": 0}
    groups = opt.state_dict()["param_groups"]
    opt.load_state_dict({"state": {0: theirs}, "param_groups": groups})
    state = opt.state[p]
    assert float(state["step"]) == 7
    assert torch.equal(state["exp_avg_sq_row"], row)
    assert torch.equal(state["exp_avg_sq_col"], col)
    assert state["exp_avg"].dtype == torch.bfloat16
    set_grads([p], 0)
    opt.step()
    assert float(state["step"]) == 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": 1e-3, "relative_step": True}, ValueError, "relative_step=False"),
        ({"relative_step": False}, ValueError, "lr=None with relative_step=False"),
        ({"lr": 1e-3, "relative_step": False, "warmup_init": True}, ValueError, "warmup_init=True"),
        ({"eps": 1e-30}, TypeError, "eps=1e-30"),
        ({"eps": (None, 1e-3)}, ValueError, "semantics='torch'"),
        ({"decay_rate": 0.8}, ValueError, "decay_rate=0.8"),
        ({"clip_threshold": 0}, ValueError, "clip_threshold=0"),
        ({"semantics": "fairseq"}, ValueError, "'transformers', 'torch'"),
        ({"capturable": True}, NotImplementedError, "capturable=True"),
    ],
)
def test_misuse_is_told(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        subulp.Adafactor(make_params(), **options)
