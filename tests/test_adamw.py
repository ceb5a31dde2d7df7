"""AdamW: the formula against fp64 mathematics and torch, and what stochastic rounding must preserve in the mean."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.models import generator

EPS32 = 2.0**-24
"""Half an ulp of fp32, relative: the largest error of one rounding."""


def exact_step(p, g, m, v, step, lr, beta1, beta2, eps, decay, amsgrad_max=None):
    """One AdamW step in fp64, from the paper."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    top = v if amsgrad_max is None else torch.maximum(amsgrad_max, v)
    update = lr * (m / (1 - beta1**step)) / ((top / (1 - beta2**step)).sqrt() + eps)
    return p - lr * decay * p - update, m, v, top


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_fp32_step_is_within_an_ulp_of_exact(amsgrad, decay):
    """From our own fp32 state, one exact step in fp64; compare.

    The update takes 8 roundings (1 - beta, g - m, product, sum, sqrt, two products, sum, division, product; m and v enter
    with 4 and 4), each at most 2**-24 relative, and cancellation in m is absolute in max(|m|, |g|): 16 roundings of
    ``scale = lr / bias1 * (|m| + |g|) / denominator`` bound its error. The final sum is one rounding of p: half an ulp.
    """
    torch.manual_seed(0)
    p = Parameter(torch.randn(1000, generator=generator(0)))
    lr, betas, eps = 1e-3, (0.9, 0.999), 1e-8
    opt = subulp.AdamW([p], lr=lr, betas=betas, eps=eps, weight_decay=decay, amsgrad=amsgrad)
    for step in range(1, 101):
        before = [
            t.detach().double().clone() for t in (p, *(opt.state[p][k] for k in ("exp_avg", "exp_avg_sq") if step > 1))
        ]
        before += [torch.zeros(1000, dtype=torch.float64)] * (3 - len(before))
        top = opt.state[p]["max_exp_avg_sq"].double().clone() if amsgrad and step > 1 else None
        if amsgrad and top is None:
            top = torch.zeros(1000, dtype=torch.float64)
        g = torch.randn(1000, generator=generator(step))
        p.grad = g.clone()
        opt.step()
        p64, m64, v64, top64 = exact_step(
            before[0], g.double(), before[1], before[2], step, lr, *betas, eps, decay, top
        )
        scale = (
            lr
            / (1 - betas[0] ** step)
            * (before[1].abs() + g.double().abs())
            / ((top64 / (1 - betas[1] ** step)).sqrt() + eps)
        )
        error = (p.detach().double() - p64).abs()
        bound = 16 * EPS32 * (scale + lr * decay * before[0].abs()) + EPS32 * p64.abs() * (1 + 2 * EPS32)
        assert (error <= bound).all()
        assert (
            (opt.state[p]["exp_avg"].double() - m64).abs() <= 4 * EPS32 * (before[1].abs() + g.double().abs())
        ).all()
        assert ((opt.state[p]["exp_avg_sq"].double() - v64).abs() <= 5 * EPS32 * v64).all()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_fp32_without_decay_is_torchs_within_one_ulp_a_step(options):
    """Both add an update to p with one rounding; the updates differ by some 2**-24 of themselves, far below an ulp of p.

    So two results differ by at most one ulp of p (the same exact value may round to either neighbour). Our state is put
    into torch's optimizer before each step, so that differences cannot add up.
    """
    ours = Parameter(torch.randn(1000, generator=generator(0)) + 3)
    theirs = Parameter(ours.detach().clone())
    options = {"weight_decay": 0.0, **options}
    mine, torchs = subulp.AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for step in range(50):
        ours.grad = torch.randn(1000, generator=generator(step))
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
        ulp = 2.0 ** (torch.frexp(ours.detach().abs()).exponent.double() - 24)
        assert ((ours.detach().double() - theirs.detach().double()).abs() <= ulp).all()
        theirs.data.copy_(ours)
        torchs.load_state_dict(copy.deepcopy(mine.state_dict()))  # torch aliases what it loads


def test_weight_decay_alone_follows_its_closed_form():
    """OneTrainer #996: 0.7 (1 - 1e-5)**n. SR errors are independent over elements: the mean has the sampled error."""
    n, steps = 4096, 20_000
    p = Parameter(torch.full((n,), 0.7, dtype=torch.bfloat16))
    weights = p.detach()
    start = float(weights[0])
    opt = subulp.AdamW([p], lr=1e-3, weight_decay=0.01)
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        opt.step()
    mean, error = float(weights.double().mean()), float(weights.double().std()) / math.sqrt(n)
    assert abs(mean - start * (1 - 1e-5) ** steps) < 4 * error
    nearest = Parameter(torch.full((n,), 0.7, dtype=torch.bfloat16))
    opt = subulp.AdamW([nearest], lr=1e-3, weight_decay=0.01, stochastic_rounding=False)
    nearest.grad = torch.zeros_like(nearest)
    for _ in range(100):
        opt.step()
    assert (nearest == start).all()


def test_second_moment_can_fall():
    """OneTrainer #1005: with nearest rounding bf16 exp_avg_sq never falls for beta2 = 0.999."""
    n, steps = 4096, 3000
    p = Parameter(torch.zeros(n, dtype=torch.bfloat16))
    opt = subulp.AdamW([p], lr=1e-3)
    opt.init_state()
    v = opt.state[p]["exp_avg_sq"]
    v.fill_(1.0)
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        opt.step()
    exact = 0.999**steps
    assert abs(float(v.double().mean()) / exact - 1) < 0.01
    assert float(v.max()) < 2 * exact


@pytest.mark.parametrize("sign", [1, -1])
def test_small_learning_rate_moves_weights_as_fp32_does(sign):
    """torchtune #2254: lr 6e-7 at |w| = 0.02, where nearest rounding moves nothing."""
    n, steps = 1 << 16, 2000
    w = torch.randn(n, generator=generator(0)) * 0.02
    low, high = Parameter(w.bfloat16()), Parameter(w.bfloat16().float())
    start = high.detach().clone()
    opts = [subulp.AdamW([q], lr=6e-7, weight_decay=0.0) for q in (low, high)]
    low.grad, high.grad = torch.full((n,), 1e-3 * sign).bfloat16(), torch.full((n,), 1e-3 * sign)
    for _ in range(steps):
        for opt in opts:
            opt.step()
    moved = [(q.detach().double() - start.double()).mean() for q in (low, high)]
    # The mean's standard error is sqrt(path * ulp / n) = sqrt(1.2e-3 * 6e-5 / 65536) = 1.0e-6, 0.09 % of the path.
    assert abs(float(moved[0] / moved[1]) - 1) < 0.02


@pytest.mark.slow
def test_noisy_quadratic_reaches_the_loss_of_fp32():
    """Only the second moment's storage differs. Nearest rounding cannot lower it, so late steps are too small.

    Loss mean(a w^2) with curvatures a over two decades; gradients a w (1 + 0.5 noise), so that they fade as w does.
    Measured at step 6000: fp32 6.7e-7, nearest 150 to 250 times that. Before step 2000 nearest is slightly better.
    """
    n, steps = 512, 6000
    curvature = torch.logspace(-2, 0, n)
    noise = generator(7)
    start = torch.randn(n, generator=generator(1))
    runs: dict[str, tuple[Any, bool]] = {
        "fp32": ("fp32", True),
        "nearest": ({"exp_avg": "fp32", "exp_avg_sq": "bf16"}, False),
        "sr": ({"exp_avg": "fp32", "exp_avg_sq": "bf16"}, True),
    }
    params = {name: Parameter(start.clone()) for name in runs}
    opts = [
        subulp.AdamW([params[name]], weight_decay=0.0, state_dtype=dtype, stochastic_rounding=stochastic, stream=0)
        for name, (dtype, stochastic) in runs.items()
    ]
    for _ in range(steps):
        factor = 1 + 0.5 * torch.randn(n, generator=noise)
        for p, opt in zip(params.values(), opts, strict=True):
            p.grad = curvature * p.detach() * factor
            opt.step()
    losses = {name: float((curvature * p.detach() ** 2).mean()) for name, p in params.items()}
    assert losses["sr"] < 1.3 * losses["fp32"]
    assert losses["nearest"] > 50 * losses["fp32"]


def test_stored_moments_follow_fp32_in_the_mean():
    """m and v are linear in their noise, so E[stored] is the fp32 value; the mean over n elements within 5 errors."""
    n, steps = 1 << 14, 200
    p = Parameter(torch.zeros(n, dtype=torch.bfloat16))
    opt = subulp.AdamW([p], lr=0.0)
    m = v = 0.0
    for step in range(steps):
        g = float(torch.tensor(1.0 + 0.5 * math.sin(step)).bfloat16())
        p.grad = torch.full((n,), g, dtype=torch.bfloat16)
        opt.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    for name, exact in (("exp_avg", m), ("exp_avg_sq", v)):
        stored = opt.state[p][name].double()
        assert abs(float(stored.mean()) - exact) < 5 * float(stored.std()) / math.sqrt(n)


def test_zero_learning_rate_and_gradient_leave_every_bit():
    patterns = torch.arange(1 << 16).to(torch.int16)
    p = Parameter(patterns.view(torch.bfloat16))
    opt = subulp.AdamW([p], lr=0.0, weight_decay=0.1)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert torch.equal(p.detach().view(torch.int16), patterns)  # NaNs of every payload and infinities included


def test_every_part_is_rounded_independently():
    """p, m and v of an element take draws of their own: P(all up) is the product, not the smallest."""
    n = 1 << 16
    p = Parameter(torch.ones(n, dtype=torch.bfloat16))
    opt = subulp.AdamW([p], lr=2.0**-9, weight_decay=0.0)  # p falls by half an ulp below 1
    p.grad = torch.full((n,), 1.001953125, dtype=torch.float32).bfloat16()
    opt.step()
    state = opt.state[p]
    ups = [t.float() > t.float().min() for t in (p.detach(), state["exp_avg"], state["exp_avg_sq"])]
    rates = [float(u.double().mean()) for u in ups]
    for a in range(3):
        for b in range(a):
            both = float((ups[a] & ups[b]).double().mean())
            spread = math.sqrt(rates[a] * rates[b] * (1 - rates[a] * rates[b]) / n)
            assert abs(both - rates[a] * rates[b]) < 5.5 * max(spread, 1 / n)
