"""Which steps count: torch.distributed.checkpoint makes state by a step of its own, which must leave no trace."""

from __future__ import annotations

import pytest
import torch

import subulp
from tests.bits import same_bits
from tests.models import everything, make_params, set_grads, train
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", [s for s in SPECS if s.cls is not subulp.Adafactor], ids=str)


@all_optimizers
def test_a_step_that_only_makes_state_leaves_no_trace(spec):
    """lr=0 and zero gradients before the first step, as torch's ``_init_optim_state`` does (Megatron-LM #5976)."""
    params, reference = make_params(), make_params()
    opt, other = spec.make(params, backend="eager"), spec.make(reference, backend="eager")
    lr = opt.param_groups[0]["lr"]
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    opt.param_groups[0]["lr"] = lr
    assert all(float(opt.state[p]["step"]) == 0 for p in params)
    train(opt, params, 3)
    train(other, reference, 3)
    assert all(map(same_bits, everything(opt, params), everything(other, reference)))
    assert all(float(opt.state[p]["step"]) == 3 for p in params if p.numel())


def test_a_first_step_at_rate_0_counts_where_a_gradient_is_not_zero():
    """The first step of a warm-up: it feeds the moments, so their bias correction has to count it."""
    params = make_params(((4,), (4,)))
    opt = subulp.AdamW(params, lr=0.0, backend="eager")
    set_grads(params, 0)
    params[1].grad.zero_()
    opt.step()
    assert [float(opt.state[p]["step"]) for p in params] == [1, 0]
    opt.step()
    assert [float(opt.state[p]["step"]) for p in params] == [2, 1]
