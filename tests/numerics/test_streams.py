"""Streams: distinct for all parameters of a process, the same for replicas and resumed runs, made in one pass."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from subulp.numerics import streams
from tests.bits import same_bits
from tests.models import set_grads, train
from tests.specs import SPECS

COUNT = 4096


def equal_parameter() -> Parameter:
    """Every element in the middle between two bf16 numbers once it has moved: a coin for each."""
    return Parameter(torch.linspace(0.5, 1, COUNT).bfloat16())


def rounded(make) -> list[Tensor]:
    """Equal parameters after an equal step, one optimizer for each, made as the host makes them."""
    params = [equal_parameter() for _ in range(3)]
    for opt, p in zip(make(params), params, strict=True):
        p.grad = torch.ones_like(p)
        opt.step()
    return [p.detach() for p in params]


def correlation(a: Tensor, b: Tensor) -> float:
    before = equal_parameter().detach()
    moved = torch.stack([(a != before).double(), (b != before).double()])
    return float(torch.corrcoef(moved)[0, 1])


HOSTS = {
    "an optimizer for each parameter": lambda cls, options: lambda params: [cls([p], **options) for p in params],
    "a group each": lambda cls, options: lambda params: [cls([{"params": [p]}], **options) for p in params],
    "one after the other, as a factory": lambda cls, options: (
        lambda params: (subulp.from_config(cls.__name__, [p], **options) for p in params)
    ),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_independent_optimizers_without_names_do_not_share_noise(spec, host):
    results = rounded(HOSTS[host](spec.cls, {**spec.defaults, "lr": 1e-4}))
    for a, b in combinations(results, 2):
        # Independent coins: |r| has a standard deviation of 1 / 64; five of them, false alarm 6e-7 a pair.
        assert abs(correlation(a, b)) < 5 / COUNT**0.5


def test_two_models_do_not_share_noise():
    params = [[equal_parameter() for _ in range(4)] for _ in range(2)]
    for model in params:
        opt = subulp.AdamW(model, lr=1e-4)
        for p in model:
            p.grad = torch.ones_like(p)
        opt.step()
    for a, b in combinations([p.detach() for model in params for p in model], 2):
        assert abs(correlation(a, b)) < 5 / COUNT**0.5


def test_the_count_is_the_order_of_construction_and_names_are_not_counted():
    first = subulp.AdamW([equal_parameter()]).param_groups[0]["stream"]
    subulp.AdamW([("a", equal_parameter())])
    subulp.SGD([equal_parameter()], stream=7)
    assert subulp.Lion([equal_parameter()]).param_groups[0]["stream"] == first + 2**32
    with pytest.raises(ValueError, match="lr"):
        subulp.AdamW([equal_parameter()], lr=-1.0)
    assert subulp.Lion([equal_parameter()]).param_groups[0]["stream"] == first + 2 * 2**32


SCRIPT = """
import torch, subulp
torch.manual_seed(0)
nets = [torch.nn.Linear(8, 8).bfloat16() for _ in range(2)]
opts = [subulp.AdamW(net.parameters(), lr=1e-3) for net in nets]
for step in range(3):
    for net, opt in zip(nets, opts):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
print([p.float().sum().item() for net in nets for p in net.parameters()])
"""


@pytest.mark.slow
def test_replicas_of_a_script_draw_the_same():
    outputs = {subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 1


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_resumed_run_without_names_goes_on_as_the_whole_one(spec):
    """Also parameters that get their first gradient after the resume: the group keeps where its streams begin."""
    whole = [equal_parameter() for _ in range(2)]
    opt = spec.cls(whole, **spec.defaults)
    for p in whole[:1]:
        p.grad = torch.ones_like(p)
    opt.step()
    resumed = [Parameter(p.detach().clone()) for p in whole]
    other = spec.cls(resumed, **spec.defaults)
    assert other.param_groups[0]["stream"] != opt.param_groups[0]["stream"]
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for params, o in ((whole, opt), (resumed, other)):
        train(o, params, 2, start=1)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(whole, resumed, strict=True))


def test_fresh_parameters_beside_loaded_ones_take_free_streams():
    """OneTrainer adds a group before the others: 228 parameters then had 208 streams."""
    old = [Parameter(torch.zeros(1)) for _ in range(200)]
    saved = subulp.AdamW(old)
    saved.init_state()
    new = [Parameter(torch.zeros(1)) for _ in range(28)]
    opt = subulp.AdamW([{"params": new}, {"params": old}], stream=saved.param_groups[0]["stream"])
    state = saved.state_dict()
    state["param_groups"][0]["params"] = list(range(28, 228))
    state["state"] = {key + 28: value for key, value in state["state"].items()}
    state["param_groups"].insert(0, {**state["param_groups"][0], "params": list(range(28))})
    opt.load_state_dict(state)
    opt.init_state()
    found = [int(opt.state[p]["stream"]) for p in (*new, *old)]
    assert len(set(found)) == 228
    assert found[28:] == [int(saved.state[p]["stream"]) for p in old]


def test_streams_do_not_depend_on_the_order_in_which_states_are_made():
    def streams_after(order):
        params = [Parameter(torch.zeros(1)) for _ in range(6)]
        # The wrapper's component is removed, so that these names are pairwise the same.
        names = [f"{'module.' * (i % 2)}layer{i // 2}" for i in range(6)]
        opt = subulp.AdamW(list(zip(names, params, strict=True)))
        for i in order:
            set_grads([params[i]], 0)
            opt.step_param(params[i])
        return [int(opt.state[p]["stream"]) for p in params]

    first = streams_after(range(6))
    assert len(set(first)) == 6
    assert streams_after([5, 3, 1, 0, 2, 4]) == first


@pytest.mark.parametrize("named", [True, False])
def test_making_states_takes_one_pass(named):
    """4000 parameters took 21 s when every stream walked over all others. 0.3 s were asked for; it takes about 0.1 s."""
    params = [Parameter(torch.zeros(2)) for _ in range(4000)]
    opt = subulp.AdamW([(f"layer{i}.weight", p) for i, p in enumerate(params)] if named else params)
    start = time.perf_counter()
    opt.init_state()
    assert time.perf_counter() - start < 2.0  # a machine may be seven times slower; quadratic it would be 21 s
    assert len({int(opt.state[p]["stream"]) for p in params}) == 4000


def test_fresh_streams_among_many_loaded_ones_take_one_pass():
    old, new = ([Parameter(torch.zeros(1)) for _ in range(20_000)] for _ in range(2))
    kept = {p: i for i, p in enumerate(old)}
    start = time.perf_counter()
    result = streams.assign([{"params": new}, {"params": old}], kept)
    assert time.perf_counter() - start < 2.0
    assert len(set(result.values())) == 40_000


def test_helpers_without_names_do_not_share_noise_and_resume():
    def averaged(**options) -> tuple[subulp.EMA, Tensor]:
        ema = subulp.EMA([equal_parameter()], **options)
        ema.step([Parameter(equal_parameter().detach() + 0.01)], 5)
        return ema, ema.ema_parameters[0]

    (first, a), (_, b) = averaged(), averaged()
    assert not same_bits(a, b)
    again = subulp.EMA([equal_parameter()])
    again.load_state_dict({**first.state_dict(), "ema_parameters": [equal_parameter()]})
    again.step([Parameter(equal_parameter().detach() + 0.01)], 5)
    assert same_bits(again.ema_parameters[0], a)
    assert same_bits(averaged(stream=3)[1], averaged(stream=3)[1])

    def accumulated(**options) -> tuple[subulp.GradientAccumulation, Parameter, Tensor]:
        p = equal_parameter()
        accumulation = subulp.GradientAccumulation([p], 2, **options)
        return accumulation, p, passes(p)

    def passes(p: Parameter) -> Tensor:
        p.grad = None
        for scale in (1.0, 0.001):
            (p.float() * torch.linspace(0.5, 1, COUNT) * scale).sum().backward()
        return p.grad if p.grad is not None else torch.empty(0)

    (one, p, a), (two, q, b) = accumulated(), accumulated()
    assert not same_bits(a, b)
    two.load_state_dict(one.state_dict())
    assert same_bits(passes(p), passes(q))
    assert same_bits(accumulated(stream=3)[2], accumulated(stream=3)[2])


def test_a_position_counts_all_parameters_those_that_keep_a_stream_too():
    p, q, r = (Parameter(torch.zeros(1)) for _ in range(3))
    base = 5 << 32
    groups = [{"params": [p, q], "stream": base}, {"params": [r], "stream": base}]
    assert streams.assign(groups, {p: 77}) == {p: 77, q: base + 1, r: base + 2}


def test_names_that_are_not_those_of_the_parameters_are_not_used():
    """ZeroRedundancyOptimizer takes parameters out of a group and leaves all its names."""
    p, q = (Parameter(torch.zeros(1)) for _ in range(2))
    assert streams.assign([{"params": [p, q], "param_names": ["a", "b", "c"], "stream": 9}], {}) == {p: 9, q: 10}
