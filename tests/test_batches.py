"""Groups that share launches have the bits of groups that are stepped alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import everything, make_params, set_grads

SHAPES = ((5,), (3, 4), (0,), (7,))
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rates": [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.5}, {"lr": torch.tensor(0.3), "betas": (0.5, 0.6)}],
    "rounding": [{}, {"stochastic_rounding": False}, {}],
    "seeds": [{"seed": 1}, {"seed": 2}, {}],
    "directions": [{}, {"maximize": True}, {}],
    "formulas": [{"amsgrad": True}, {}, {"amsgrad": True, "eps": 0.1}],
    "paused": [{"lr": 0.0}, {"lr": 0.1}, {"lr": 0.0}],
}


def grouped(options: list[dict[str, Any]], backend: str) -> tuple[list[list[Parameter]], Any]:
    params = [make_params(SHAPES, seed=i) for i in range(len(options))]
    groups = [
        {"params": [(f"{i}.{n}", p) for n, p in enumerate(own)], **chosen}
        for i, (own, chosen) in enumerate(zip(params, options, strict=True))
    ]
    return params, subulp.AdamW(groups, lr=0.1, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_groups_together_have_the_bits_of_each_alone(options: list[dict[str, Any]], backend: str) -> None:
    """Also where a group's parameters have made other numbers of steps, and some of a paused group do not count."""
    together, opt = grouped(options, backend)
    alone, other = grouped(options, backend)
    for step in range(4):
        for params in (together, alone):
            for own in params:
                set_grads(own, step)
            if step == 0:
                for own in params:
                    own[0].grad.zero_()
            if step == 1:
                params[1][1].grad = params[2][3].grad = None
        opt.step()
        for own, group in zip(alone, other.param_groups, strict=True):
            for p in own:
                other.step_parameter(p, group)
    for own, separate in zip(together, alone, strict=True):
        assert all(map(same_bits, everything(opt, own), everything(other, separate)))


def test_groups_with_other_backends_each_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from subulp.backends import eager

    seen = []
    run = eager.run

    def counted(rule: Any, bucket: Any, **options: Any) -> None:
        seen.append(len(bucket.streams))
        run(rule, bucket, **options)

    monkeypatch.setattr(eager, "run", counted)
    params, opt = grouped([{"backend": "numba"}, {"backend": "eager"}, {"backend": "numba"}], "auto")
    for own in params:
        set_grads(own, 0)
    opt.step()
    assert seen == [3]  # one launch, of the parameters that are not empty


def test_hyperparameters_that_are_tensors_are_read_as_numbers() -> None:
    """Also in tuples: scalars are computed in fp64, not in the tensor's precision."""
    results = []
    for tensors in (True, False):
        betas = [torch.tensor(0.7), torch.tensor(0.93)]
        params = make_params(SHAPES, torch.float32)
        values: Any = tuple(betas) if tensors else tuple(map(float, betas))
        opt = subulp.AdamW(params, lr=0.1, betas=values, stream=0, backend="eager")
        for step in range(5):
            set_grads(params, step)
            opt.step()
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


def test_groups_share_no_tensor_for_their_rate() -> None:
    """Schedulers write into it (pytorch issue 126854)."""
    params = make_params(SHAPES[:2])
    opt = subulp.AdamW([{"params": [p]} for p in params], lr=torch.tensor(0.1))
    opt.param_groups[0]["lr"].fill_(0.5)
    assert float(opt.param_groups[1]["lr"]) == pytest.approx(0.1)
