"""What a step writes counts as written for autograd: a backward pass that needs the old values raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from tests.models import make_params, set_grads
from tests.specs import SPECS, first_fast

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def written(opt: subulp.optimizer.Optimizer, p: Tensor) -> dict[str, Tensor]:
    return {"param": p, **{name: value for name, value in opt.state[p].items() if name != "stream"}}


@first_fast(SPECS)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("step", ["step", "step_parameter"])
def test_every_written_tensor_has_a_new_version(spec, backend, step):
    """Matrices and vectors, contiguous and not, in a first step, and in the ones after it, which may go another way."""
    params = [*make_params(((256, 130), (300,), ())), Parameter(torch.randn(9, 7).bfloat16().t())]
    if spec.elementwise:
        params.append(Parameter(torch.randn(5, dtype=torch.complex64)))
    opt = spec.make(params, backend=backend)
    opt.init_state()
    for _ in range(3):
        set_grads(params, 1)
        tensors = {(i, name): t for i, p in enumerate(params) for name, t in written(opt, p).items()}
        before = {key: t._version for key, t in tensors.items()}
        if step == "step":
            opt.step()
        else:
            for p in params:
                opt.step_parameter(p, opt.param_groups[0])
        stale = {key for key, t in tensors.items() if t._version == before[key]}
        # The sample of Prodigy's start is never written again; the RMS of Adafactor is a new tensor each time.
        assert {name for _, name in stale} <= {"p0", "RMS"}


@all_optimizers
def test_a_step_between_forward_and_backward_raises_as_torch_does(spec):
    p = Parameter(torch.full((130, 140), 0.5, dtype=torch.bfloat16))
    opt = spec.make([p])
    for _ in range(2):  # with a plan and without
        first, second = (p * p).sum(), (p * p * p).sum()
        p.grad = None
        first.backward()
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_functions_and_averages_count(dtype):
    x = torch.randn(40)
    target = torch.zeros(40, dtype=dtype)
    calls = [
        lambda: subulp.copy_stochastic_(target, x, seed=0),
        lambda: subulp.add_stochastic_(target, x, seed=0),
        lambda: subulp.addcdiv_stochastic_(target, x, x, seed=0),
        lambda: subulp.lerp_stochastic_(target, x, 0.5, seed=0),
        lambda: subulp.copy_stochastic_(target[::2], x[::2], seed=0),
    ]
    for call in calls:
        before = target._version
        call()
        assert target._version > before
    ema = subulp.EMA([Parameter(x.to(dtype))], decay=0.9)
    before = ema.ema_parameters[0]._version
    ema.step([Parameter(x.to(dtype))], 3)
    assert ema.ema_parameters[0]._version > before


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        x = torch.randn(10)
        assert subulp.round_stochastic(x, torch.bfloat16, seed=0).shape == (10,)
    assert subulp.round_stochastic(x, torch.bfloat16, seed=0).shape == (10,)
