"""Launch plans: each change between two steps is seen, and the step after it has the bits of one without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import everything, generator, make_params, set_grads

SHAPES = ((4, 6), (9,), (5,))
Change = Callable[[list[Parameter], Any], None]


def transposed_gradient(params: list[Parameter], opt: Any) -> None:
    params[0].grad = params[0].grad.view(6, 4).t()


def wider_gradient(params: list[Parameter], opt: Any) -> None:
    params[1].grad, params[1].grad_dtype = None, None
    params[1].grad = torch.randn(9, generator=generator(5))


def other_stream(params: list[Parameter], opt: Any) -> None:
    opt.state[params[2]]["stream"] = opt.state[params[0]]["stream"]


def other_memory(params: list[Parameter], opt: Any) -> None:
    params[1].data = params[1].data.clone()
    opt.state[params[0]]["momentum_buffer"].data = opt.state[params[0]]["momentum_buffer"].data + 1


def another_count(params: list[Parameter], opt: Any) -> None:
    opt.state[params[1]]["step"].data = opt.state[params[1]]["step"].data + 5


def turned(params: list[Parameter], opt: Any) -> None:
    for t in (params[0], opt.state[params[0]]["momentum_buffer"]):
        t.data = t.data.view(6, 4).t()


CHANGES: dict[str, Change] = {
    "rule": lambda params, opt: opt.param_groups[0].update(nesterov=True),
    "rounding": lambda params, opt: opt.param_groups[0].update(stochastic_rounding=False),
    "seed": lambda params, opt: opt.param_groups[0].update(seed=7),
    "rate": lambda params, opt: opt.param_groups[0].update(lr=0.3),
    "maximize": lambda params, opt: opt.param_groups[0].update(maximize=True),
    "no gradient": lambda params, opt: setattr(params[0], "grad", None),
    "state gone": lambda params, opt: opt.state[params[1]].pop("momentum_buffer"),
    "transposed gradient": transposed_gradient,
    "wider gradient": wider_gradient,
    "stream": other_stream,
    "memory": other_memory,
    "count": another_count,
    "strides": turned,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_takes_effect_at_the_next_step(change: Change) -> None:
    results = []
    for backend in ("eager", "numba"):
        params = make_params(SHAPES)
        opt = subulp.SGD(params, lr=0.1, momentum=0.9, stream=1 << 40, backend=backend)
        kept = []
        for step in range(4):
            set_grads(params, step)
            kept.append([p.grad for p in params])  # so that no gradient takes the address of the one before
            if step == 2:
                change(params, opt)
            opt.step()
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


def test_a_parameter_that_has_shrunk_in_place_is_refused() -> None:
    """Its address is the same; a plan that went by addresses would write behind its end."""
    params = make_params(SHAPES)
    opt = subulp.SGD(params, lr=0.1, momentum=0.9, stream=0, backend="numba")
    for step in range(2):
        set_grads(params, step)
        opt.step()
    whole = params[1].data
    params[1].grad = None
    params[1].data = whole[:4]
    set_grads(params, 2)
    before = whole.clone()
    with pytest.raises(ValueError, match="momentum_buffer"):
        opt.step()
    assert same_bits(whole, before)


@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_each_parameter_takes_its_own_count_in_buckets_of_two_dtypes(backend: str) -> None:
    """Scalars and noise go by a parameter's count, with the plan of the first step and after it."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)

    def make() -> tuple[list[Parameter], Any]:
        params = [make_params(((11,),), d, seed=i)[0] for i, d in enumerate(dtypes)]
        return params, subulp.AdamW(params, lr=0.1, stream=0, backend=backend)

    together, opt = make()
    alone, other = make()
    for step in range(5):
        for params in (together, alone):
            set_grads(params, step)
            for i, p in enumerate(params):
                if step < i % 3:  # they begin at different steps
                    p.grad = None
        opt.step()
        for p in alone:
            other.step_parameter(p, other.param_groups[0])
    assert all(map(same_bits, everything(opt, together), everything(other, alone)))


@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_strides_belong_to_their_parameter_in_buckets_of_two_dtypes(backend: str) -> None:
    results = []
    for strided in (True, False):
        dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
        params = [make_params(((6, 9),), d, seed=i)[0] for i, d in enumerate(dtypes)]
        if strided:
            params[1].data = params[1].data.t().contiguous().t()
        opt = subulp.AdamW(params, lr=0.1, stream=0, backend=backend)
        for step in range(3):
            set_grads(params, step)
            opt.step()
        results.append([p.detach().contiguous() for p in params])
    assert all(map(same_bits, *results))
