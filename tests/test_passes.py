"""What a step of the optimizers with sums costs: passes, whose number does not go by that of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import subulp
from subulp import passes, staged
from subulp.backends import sums
from subulp.passes import Kind
from tests.bits import same_bits
from tests.models import everything, make_params, set_grads, train

OPTIMIZERS = [(subulp.Adafactor, {}), (subulp.CAME, {"lr": 1e-3}), (subulp.Prodigy, {})]


def calls_of_a_step(cls: Any, options: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    params = make_params(((5, 7),) * count)
    opt = cls(params, **options)
    train(opt, params, 2)
    found = {"sums": 0, "run_factored": 0, "sum_over_shards": 0}
    with monkeypatch.context() as patch:
        for module, name in ((sums, "sums"), (sums, "run_factored"), (passes, "sum_over_shards")):
            original = getattr(module, name)

            def counted(*args: Any, original: Any = original, name: str = name, **more: Any) -> Any:
                found[name] += 1
                return original(*args, **more)

            patch.setattr(module, name, counted)
        train(opt, params, 1)
    return found


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
def test_launches_and_collectives_do_not_go_by_the_number_of_parameters(cls, options, monkeypatch):
    one = calls_of_a_step(cls, options, 1, monkeypatch)
    assert calls_of_a_step(cls, options, 40, monkeypatch) == one
    assert one["sums"] <= 5
    assert one["sum_over_shards"] <= 8


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS[:2], ids=str)  # Prodigy's estimate is common to all
def test_company_changes_no_bit(cls, options):
    shapes = ((5, 7), (9,), (2, 3, 4), (5, 7))
    together = make_params(shapes)
    named = [(f"p{i}", p) for i, p in enumerate(together)]
    opt = cls(named, **options)
    train(opt, together, 3)
    alone = make_params(shapes)
    each = [cls([(f"p{i}", p)], **options) for i, p in enumerate(alone)]
    for step in range(3):
        set_grads(alone, step)
        for own in each:
            own.step()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(together, alone, strict=True))


@pytest.mark.parametrize(("cls", "options"), [*OPTIMIZERS, (subulp.Muon, {"lr": 1e-2})], ids=str)
@pytest.mark.parametrize("together", [1, 60, 100])
def test_batches_change_no_bit(cls, options, together, monkeypatch):
    results = []
    for limit in (staged.TOGETHER, together):
        monkeypatch.setattr(staged, "TOGETHER", limit)
        params = make_params(((5, 7), (6, 4), (5, 7), (4, 4)))
        opt = cls(params, stream=0, **options)
        train(opt, params, 3)
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
def test_a_plan_is_made_once_and_again_when_something_changes(cls, options, monkeypatch):
    made: list[int] = []
    monkeypatch.setattr("subulp.staged.Kind", lambda *args: made.append(1) or Kind(*args))  # type: ignore[func-returns-value]
    params = make_params(((5, 7), (4, 3)))
    opt = cls(params, **options)
    train(opt, params, 4)
    before = len(made)
    assert before <= 2  # the first step of a state that is new may not count yet
    train(opt, params, 2, start=4)
    assert len(made) == before
    name = "exp_avg_sq" if cls is subulp.Prodigy else "exp_avg_sq_row"
    opt.state[params[0]][name] = opt.state[params[0]][name].clone()
    train(opt, params, 1, start=6)
    assert len(made) == before + 1
    params[1].data = torch.zeros(3, 4, dtype=params[1].dtype)
    params[1].grad = None
    params[0].grad = torch.ones_like(params[0])
    opt.step()
    assert len(made) == before + 2
