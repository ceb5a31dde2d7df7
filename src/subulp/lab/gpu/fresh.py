"""The first step of a fresh process, in which nothing has been compiled or cached yet."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch.nn import Parameter

import subulp
from subulp.lab.gpu import child
from subulp.lab.gpu.report import Fault, Report
from subulp.lab.gpu.setting import CPU, Setting, normal
from subulp.lab.tensors import written

SECONDS = 60.0


def section(setting: Setting, report: Report) -> None:
    """One check."""
    report.check(
        "first step of a fresh process", partial(compare, setting, min(SECONDS, report.budget.left())), least=15.0
    )


def compare(setting: Setting, timeout: float) -> str:
    """The digest that another process finds against the CPU's."""
    if child.call(setting, "first-step", timeout=timeout) != first_step(CPU, "eager"):
        raise Fault("its bits differ from the CPU's")
    return ""


def first_step(device: torch.device, backend: str) -> str:
    """SHA-256 of everything that one step writes."""
    p = Parameter(normal((700,), 1).to(device))
    optimizer = subulp.AdamW([p], lr=1e-3, seed=3, backend=backend, stream=0)
    p.grad = normal((700,), 2).to(device)
    optimizer.step()
    digest = hashlib.sha256()
    for t in written(optimizer):
        digest.update(t.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
