"""A step captured as a CUDA graph: each replay takes its own step number, learning rate, gradient and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

import subulp
from subulp.lab.gpu.report import Report
from subulp.lab.gpu.setting import CPU, Setting, normal, require_equal
from subulp.lab.tensors import written

WARM_UPS = 3
STEPS = 7
SHAPES = ((1001,), (33, 5))


def section(setting: Setting, report: Report) -> None:
    """One check."""
    report.check("capture and replay", partial(replayed, setting))


def replayed(setting: Setting) -> str:
    """Warm-up steps and replays give the bits of as many steps on the CPU."""
    lr = torch.full((), 1e-3, dtype=torch.float64, device=setting.device)
    graph = _optimizer(setting.device, lr=lr, capturable=True, backend=setting.backend)
    replay = captured(setting, graph.step)
    reference = _optimizer(CPU, lr=1e-3, backend="eager")
    for step in range(STEPS):
        if step >= WARM_UPS:  # the steps before have been made as warm-ups, all alike
            rate = 1e-3 / step
            lr.fill_(rate)
            reference.param_groups[0]["lr"] = rate
            _set_gradients(graph, step)
            _set_gradients(reference, step)
            replay()
        reference.step()
    setting.synchronize()
    # The device's fp64 power may be an ulp off the host's, which changes an fp32 scalar once in 2**29.
    return f"{STEPS - WARM_UPS} replays: {require_equal(written(graph), written(reference))}"


def _optimizer(device: torch.device, **options: Any) -> subulp.AdamW:
    params = [Parameter(normal(shape, i).to(device)) for i, shape in enumerate(SHAPES)]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = subulp.AdamW(params, weight_decay=0.1, seed=3, stream=0, **options)
    _set_gradients(optimizer, 0)
    return optimizer


def _set_gradients(optimizer: subulp.AdamW, step: int) -> None:
    """In place, as a captured backward pass does."""
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        p.grad.copy_(normal(p.shape, 100 * step + i + 10))


def captured(setting: Setting, step: Callable[[], Any]) -> Callable[[], Any]:
    """Makes WARM_UPS steps and captures one; calling the result replays it. On a CPU the result is the step itself."""
    if setting.device.type == "cpu":
        for _ in range(WARM_UPS):
            step()
        return step
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
