"""``torch.compile`` around code that steps an optimizer: the step is one opaque call."""

from __future__ import annotations

import pytest
import torch

import subulp
from tests.bits import same_bits
from tests.models import everything, generator, make_params, set_grads


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_step_is_not_recompiled_when_the_learning_rate_changes():
    params, plain = make_params(), make_params()
    opt, reference = subulp.AdamW(params, stream=0), subulp.AdamW(plain, stream=0)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for i in range(21):
        for p, o in ((params, opt), (plain, reference)):
            set_grads(p, i)
            o.param_groups[0]["lr"] = 1e-2 / (i + 1)
            o.step() if o is reference else step()
        if i == 0:
            torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    assert all(map(same_bits, everything(opt, params), everything(reference, plain)))


def test_a_whole_train_step_compiles():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).bfloat16()
    opt = subulp.AdamW(model.named_parameters(), lr=1e-2)
    x = torch.randn(16, 8, generator=generator(0)).bfloat16()

    def train_step():
        loss = model(x).float().square().mean()
        value = loss.detach()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return value

    compiled = torch.compile(train_step, backend="eager")
    losses = [float(compiled()) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert int(opt.state[model.weight]["step"]) == 10
