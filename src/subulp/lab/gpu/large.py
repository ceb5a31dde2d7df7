"""A parameter of more than 2**31 elements, whose indices need 64 bits."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from subulp.backends import eager
from subulp.backends.bucket import Bucket
from subulp.lab.gpu.report import Report, Skipped
from subulp.lab.gpu.setting import BF16, CPU, Setting, require_equal
from subulp.lab.tensors import written
from subulp.numerics.layout import Layout

SIZE = 2**31 + 1000
SMALL_SIZE = 5000
WINDOW = 1000
SEED = 7


def section(setting: Setting, report: Report) -> None:
    """One check."""
    size = SMALL_SIZE if setting.rehearsal else SIZE
    report.check(f"{size} elements", partial(compare_windows, setting, size), least=30.0)


def compare_windows(setting: Setting, size: int) -> str:
    """A step of the whole tensor; the reference backend repeats it on windows of it, on the CPU."""
    needed = 9 * size  # weight, gradient and both moments in bf16, and a little
    if setting.free_memory() < needed:
        raise Skipped(f"needs {needed / 2**30:.0f} GiB of free device memory")
    p = Parameter(torch.empty(size, dtype=BF16, device=setting.device))
    optimizer = subulp.AdamW([p], lr=1e-3, weight_decay=0.1, seed=SEED, backend=setting.backend, stream=0)
    optimizer.init_state()
    state = optimizer.state[p]
    state["step"].fill_(2)
    p.grad = torch.empty_like(p)
    generator = torch.Generator(setting.device)
    columns = [*written(optimizer), p.grad]
    for i, t in enumerate(columns):
        t.normal_(generator=generator.manual_seed(i)).abs_()
    starts = sorted({0, size // 16 * 8, size - WINDOW - WINDOW // 2 - 1, size - WINDOW})
    windows = [[t[start : start + WINDOW].to(CPU, copy=True) for t in columns] for start in starts]
    optimizer.step()
    expected: list[Tensor] = []
    for start, window in zip(starts, windows, strict=True):
        _reference_step(optimizer, window, start, int(state["stream"]))
        expected += window
    ours = [t[start : start + WINDOW] for start in starts for t in columns]
    detail = require_equal(ours, expected)
    del columns, ours, state, optimizer, p
    setting.release()
    return f"{len(starts)} windows of {WINDOW} elements: {detail}"


def _reference_step(optimizer: subulp.AdamW, window: list[Tensor], start: int, stream: int) -> None:
    """The third step of elements ``start`` and following, on the CPU."""
    group = optimizer.param_groups[0]
    bucket = Bucket(
        [[t] for t in window[:-1]],
        [[window[-1]]],
        [Layout(start, (WINDOW,), (1,))],
        [stream],
        np.array([3]),
        np.array([optimizer.rule(group).ordered(optimizer.scalars(group, 3.0))]),
        np.zeros(1, dtype=np.int64),
    )
    eager.run(optimizer.rule(group), bucket, seed=SEED, stochastic=True)
