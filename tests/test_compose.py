"""Rules made of parts: what they compute, on every backend, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import subulp
from subulp.backends import eager
from subulp.backends.bucket import single
from subulp.formula.compose import compose, part
from subulp.formula.factors import weighed
from subulp.formula.ops import where
from subulp.formula.rule import Rule, State
from subulp.numerics.views import flat_views
from subulp.rules.adamw import AMSGRAD, MOMENTS, PLAIN, adam_direction
from subulp.rules.parts import averaged, decayed, interpolated, scaled, second_moment
from tests.bits import same_bits
from tests.models import everything, generator, make_params, train


@part("u")
def cautious(u, g):
    """Liang et al. 2024 (arXiv 2411.16085), without its mean: where the update opposes the gradient there is none."""
    return where(u * g > 0.0, u, 0.0)


CAUTIOUS = compose(interpolated, second_moment, adam_direction, cautious, decayed, states=MOMENTS)


class CautiousAdamW(subulp.AdamW):
    def rule(self, group: dict[str, Any]) -> Rule:
        return CAUTIOUS


SCALARS = {"decay": 0.01, "one_minus_beta1": 0.1, "beta2": 0.99, "one_minus_beta2": 0.01, "eps": 1e-8}
SCALARS |= {"step_size": 0.1, "rsqrt_bias2": 2.0}


def columns() -> list[Tensor]:
    g = generator(3)
    p, m, v, grad = (torch.randn(1003, generator=g) for _ in range(4))
    return [t.bfloat16() for t in (p, m, v.square(), grad)]


def run(backend: Any, rule: Rule) -> list[Tensor]:
    p, m, v, grad = columns()
    bucket = single(flat_views([p, m, v], [grad]), 5, 7, rule.ordered(SCALARS))
    backend.run(rule, bucket, seed=3, stochastic=True)
    return [p, m, v]


def test_one_more_part_is_the_whole_option_on_every_backend(monkeypatch):
    expected = run(eager, CAUTIOUS)
    numba_cpu = pytest.importorskip("subulp.backends.numba.launch")
    assert all(map(same_bits, run(numba_cpu, CAUTIOUS), expected))
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from subulp.backends.triton import launch as triton_gpu

    assert all(map(same_bits, run(triton_gpu, CAUTIOUS), expected))
    plain = run(eager, PLAIN)
    assert not same_bits(plain[0], expected[0])
    assert all(map(same_bits, plain[1:], expected[1:]))


def test_an_optimizer_takes_a_composed_rule():
    """Where all gradients agree with the momentum, the mask changes nothing; where they turn, p only decays."""
    results = []
    for cls in (subulp.AdamW, CautiousAdamW):
        params = make_params(((5, 7),), torch.float32)
        opt = cls(params, lr=0.1, weight_decay=0.0, stream=0)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))
    before = params[0].detach().clone()
    params[0].grad = torch.full_like(params[0], -0.1)
    opt.step()
    assert same_bits(params[0].detach(), before)


def test_the_expression_is_the_sequence_of_the_parts():
    p, m, v, g = (t.float() for t in columns())
    own = PLAIN.ordered(SCALARS)
    m1 = m + 0.1 * (g - m)
    v1 = 0.99 * v + 0.01 * g * g
    u = 0.1 * (m1 / (v1.double().sqrt().float() * 2.0 + 1e-8))
    for actual, expected in zip(PLAIN.formula(p, m, v, g, *own), (p - (0.01 * p + u), m1, v1), strict=True):
        assert same_bits(actual, expected)


def test_the_same_parts_are_the_same_rule():
    assert compose(interpolated, second_moment, adam_direction, decayed, states=MOMENTS) is PLAIN
    again = compose(interpolated, second_moment, adam_direction, cautious, decayed, states=dict(MOMENTS))
    assert again is CAUTIOUS
    assert PLAIN != AMSGRAD
    renamed = compose(scaled.of(u="g", scale="lr"), decayed.of(u="g"))
    assert renamed is compose(scaled.of(scale="lr", u="g"), decayed.of(u="g"))
    assert renamed.scalars == ("lr", "decay")
    assert renamed is not compose(scaled.of(u="g", scale="rate"), decayed.of(u="g"))
    assert renamed is not compose(scaled.of(u="g", scale="lr"), decayed.of(u="g"), keeps_nonfinite=False)


def test_plans_hold_for_rules_composed_at_every_step(monkeypatch):
    pytest.importorskip("numba")
    from subulp.backends.numba import plan

    class Composing(subulp.AdamW):
        def rule(self, group):
            return compose(interpolated, second_moment, adam_direction, cautious, decayed, states=MOMENTS)

    made: list[int] = []
    prepare: Any = plan.Launch  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        made.append(1)
        return prepare(*args)

    monkeypatch.setattr(plan, "Launch", counted)
    params = make_params(((5, 7), (3,)))
    opt = Composing(params, lr=0.1, backend="numba")
    train(opt, params, 4)
    assert len(made) == 1


def test_names_are_renamed_where_they_are_read_and_given():
    direction = adam_direction.of(v="v_max", u="d")
    assert direction.inputs == ("m", "v_max", "eps", "step_size", "rsqrt_bias2")
    assert direction.outputs == ("d",)
    assert scaled.of(u="b").outputs == ("b",)
    assert scaled.of(u="b").to("u").inputs == ("b", "scale")
    rows = weighed.of(r="s", u="w")
    assert dict(rows.axes) == {"s": "by_row", "c": "by_col"}
    assert str(rows) == "product(g, s, c) -> w"


def test_axes_of_operands():
    @part("u", per_tensor=["clip"])
    def clipped(u, clip):
        return clip * u

    rule = compose(weighed, clipped, averaged, decayed.of(u="m"), states={"m": State("exp_avg")})
    assert rule.by_row == ("r",)
    assert rule.by_col == ("c",)
    assert rule.per_tensor == ("clip",)
    assert rule.scalars == ("clip", "beta1", "share", "decay")
    assert rule.by_rows().reads == ("g", "c")
    assert rule.by_rows().scalars == ("r", "clip", "beta1", "share", "decay")
    assert rule.by_elements().reads == ("g", "c", "r")
    assert rule.by_elements().scalars == rule.scalars


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: compose(decayed, states={"m": State("exp_avg")}), r"No part gives \['m'\]"),
        (lambda: compose(scaled, reads=("u",)), r"Nothing uses what scaled\(u, scale\) -> u"),
        (
            lambda: compose(cautious, scaled.of(u="g", scale="lr").to("p"), reads=("g", "u")),
            "Nothing uses what cautious",
        ),
        (lambda: compose(weighed.of(r="m"), decayed, interpolated, states={"m": State("m")}), "m is elementwise and"),
        (lambda: compose(weighed.of(r="c"), decayed), "c is by_row and"),
        (lambda: decayed.of(v="w"), r"v='w': the part decayed\(p, u, decay\) -> p has"),
        (lambda: decayed.to("a", "b"), "has 1 results"),
        (lambda: part("u", by_row=["q"])(lambda g: g), r"\['q'\] of <lambda>"),
        (lambda: PLAIN.ordered({}), r"Scalars \[\] for a formula that takes"),
        (lambda: PLAIN.ordered({**SCALARS, "lr": 1.0}), "'lr'"),
    ],
)
def test_what_does_not_fit_is_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_scalars_that_do_not_fit_the_rule_change_nothing():
    class Wrong(subulp.AdamW):
        def scalars(self, group, step):
            return {**super().scalars(group, step), "surplus": 1.0}

    params = make_params(((5, 7),))
    before = [p.detach().clone() for p in params]
    opt = Wrong(params)
    with pytest.raises(ValueError, match="surplus"):
        train(opt, params, 1)
    assert all(map(same_bits, [p.detach() for p in params], before))
