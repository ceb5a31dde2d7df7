"""Step counters: exact far beyond fp32's 2**24, exchanged with torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import make_params, set_grads, train
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def at_step(opt: subulp.optimizer.Optimizer, step: float, dtype: torch.dtype = torch.float64) -> None:
    """The optimizer as if it had made so many steps, through a checkpoint."""
    opt.init_state()
    state = opt.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(step, dtype=dtype)
    opt.load_state_dict(state)


@all_optimizers
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("start", [2**24 - 1, 2**24, 2**31 + 7, 2**32 - 1, 2**53 - 4])
def test_steps_are_counted_exactly_and_draw_new_noise(spec, backend, start):
    p = Parameter(torch.full((4096,), 0.75, dtype=torch.bfloat16))
    opt = spec.make([p], backend=backend, lr=1e-4)
    at_step(opt, start)
    p.grad = torch.full_like(p, 1.0)
    moved = []
    for _ in range(2):
        before = p.detach().clone()
        opt.step()
        moved.append(p.detach() != before)
    assert float(opt.state[p]["step"]) == start + 2
    if moved[0].any() and not moved[0].all():
        assert not torch.equal(*moved)


def test_the_bias_correction_goes_on_beyond_fp32():
    """beta2 so near 1 that 2**24 steps are not many: torch's formula in fp64 against a step at 2**25."""
    start, beta2 = 2**25, 1 - 1e-8
    p = Parameter(torch.zeros(4))
    opt = subulp.AdamW([p], lr=1e-2, betas=(0.0, beta2), weight_decay=0.0, eps=0.0)
    at_step(opt, start)
    opt.state[p]["exp_avg_sq"].fill_(0.25)
    p.grad = torch.ones(4)
    opt.step()
    v = beta2 * 0.25 + (1 - beta2)
    exact = -1e-2 / (v / (1 - beta2 ** (start + 1))) ** 0.5
    # Four fp32 roundings on the way to a step of 0.011.
    assert abs(float(p.detach()[0]) / exact - 1) < 4 * 2.0**-24


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.elementwise], ids=str)
def test_fp32_counters_of_torch_are_taken_over(spec, capturable):
    params = make_params(((5,), (3, 4)))
    opt = spec.make(params, capturable=capturable)
    at_step(opt, 12.0, torch.float32)
    train(opt, params, 1)
    for p in params:
        step = opt.state[p]["step"]
        assert (step.dtype, float(step)) == (torch.float64, 13.0)
    # A tool that swaps the tensor itself, as torch.distributed.checkpoint's in-place load may.
    opt.state[params[0]]["step"] = torch.tensor(20.0)
    train(opt, params, 1)
    assert float(opt.state[params[0]]["step"]) == 21.0
    assert opt.state[params[0]]["step"].dtype == torch.float64
    # A tool that writes into it.
    opt.state[params[1]]["step"].fill_(40.0)
    opt.state[params[1]]["stream"].fill_(99)
    expected = copy.deepcopy(params[1])
    other = spec.make([expected], backend="eager", stream=99)
    other.load_state_dict(
        {
            "state": {0: copy.deepcopy(opt.state[params[1]])},
            "param_groups": [{**opt.state_dict()["param_groups"][0], "params": [0]}],
        }
    )
    set_grads(params, 5)
    expected.grad = params[1].grad.clone()
    opt.step()
    other.step()
    assert float(opt.state[params[1]]["step"]) == 41.0
    assert same_bits(params[1].detach(), expected.detach())


@pytest.mark.parametrize(
    ("cls", "theirs"),
    [(subulp.AdamW, torch.optim.AdamW), (subulp.Adam, torch.optim.Adam), (subulp.SGD, torch.optim.SGD)],
)
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_torch_loads_our_counters_and_streams_and_gives_them_back(cls, theirs, options):
    extra = {"momentum": 0.9} if cls is subulp.SGD else {}
    params, others = make_params(((5,), (3, 4)), torch.float32), make_params(((5,), (3, 4)), torch.float32)
    named, others_named = ([(f"w{i}", p) for i, p in enumerate(ps)] for ps in (params, others))
    opt = cls(named, lr=1e-2, **extra)
    train(opt, params, 3)
    other = theirs(others_named, lr=1e-2, **extra, **options)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group.update(options)
    other.load_state_dict(saved)
    train(other, others, 1, start=3)
    back = cls(named, lr=1e-2, **extra)
    back.load_state_dict(other.state_dict())
    back.init_state()
    for p in params:
        assert isinstance(back.state[p]["stream"], Tensor)
        assert int(back.state[p]["stream"]) == int(opt.state[p]["stream"])  # of the name: torch's cast left nothing
        if cls is not subulp.SGD:
            assert float(back.state[p]["step"]) == 4.0


def test_what_is_in_a_state_is_tensors():
    """torch's tests of its distributed checkpoints, and tools like them, expect nothing else."""
    for spec in SPECS:
        params = make_params(((5,), (3, 4)))
        opt = spec.make(params)
        train(opt, params, 1)
        for entry in opt.state_dict()["state"].values():
            assert all(isinstance(value, Tensor) for value in entry.values()), spec
            assert entry["stream"].dtype == torch.int64
