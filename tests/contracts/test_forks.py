"""A child made by fork can step, whatever threads its parent has used; an interrupt leaves no thread writing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from subulp.backends.forks import wait_for_all
from tests.specs import SPECS

FORK = """
import os, sys, torch, subulp
from tests.specs import SPECS
torch.set_num_threads(2)
spec = next(s for s in SPECS if s.name == {name!r})
params = [torch.nn.Parameter(torch.randn({shape}).bfloat16()) for _ in range(2)]
opt = spec.make(params)
params[0].grad = torch.randn_like(params[0])
opt.step()                          # the kernels' threads exist now
torch.randn(1 << 21).exp().sum()    # and torch's
grad = torch.randn_like(params[1])
child = os.fork()
if child == 0:
    params[0].grad, params[1].grad = None, grad
    opt.step()                      # makes a state
    os._exit(int(opt.state[params[1]]["step"]) != 1)
print("exit", os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=s.name, marks=() if s is SPECS[0] else pytest.mark.slow) for s in SPECS if s.elementwise],
)
def test_a_forked_child_makes_states_and_steps(spec):
    """64 times as many elements as torch fills in one thread: its own threads would hang in the child."""
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(name=spec.name, shape=1 << 21)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["exit", "0"], done.stderr


def test_an_interrupt_waits_for_the_threads_and_is_raised():
    """Ctrl-C in a step: the helpers write into tensors that the unwinding caller may free."""
    release, ended = threading.Event(), []

    def helper() -> None:
        release.wait(30)
        ended.append(True)

    class Interrupted(Future[Any]):
        """A future whose waiting is interrupted twice."""

        def __init__(self, future):
            super().__init__()
            self.future, self.interrupts = future, 2

        def done(self):
            return self.future.done()

        def exception(self, timeout=None):
            if self.interrupts:
                self.interrupts -= 1
                if not self.interrupts:
                    release.set()
                raise KeyboardInterrupt
            return self.future.exception()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            wait_for_all([Interrupted(pool.submit(helper))])
        assert ended == [True]


def test_a_helpers_own_error_is_raised_when_all_have_ended():
    with ThreadPoolExecutor(2) as pool:
        ended = threading.Event()
        late = pool.submit(ended.wait, 0.2)
        failed = pool.submit(int, "x")
        with pytest.raises(ValueError, match="'x'"):
            wait_for_all([failed, late])
        assert late.done()
