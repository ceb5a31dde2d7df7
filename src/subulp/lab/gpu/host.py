"""What the host must not do in a step: wait for the device, compile anew, launch on the wrong device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

import subulp
from subulp.lab.gpu.report import Fault, Report, Skipped
from subulp.lab.gpu.setting import BF16, Setting, normal, require_equal, same_bits


def section(setting: Setting, report: Report) -> None:
    """Synchronisation, compilation by Triton and by torch.compile, two devices."""
    report.check("no synchronisation", partial(no_waits, setting))
    report.check("no kernel is compiled anew", partial(no_new_kernels, setting))
    report.check("no recompilation under torch.compile", partial(no_recompilation, setting))
    report.check("parameters on two devices", partial(two_devices, setting))


class Steps:
    """An optimizer whose steps have another learning rate and gradients at other addresses each time."""

    def __init__(self, setting: Setting, columns: int = 3) -> None:
        params = [Parameter(normal((65, columns), i).to(setting.device)) for i in range(3 if setting.rehearsal else 20)]
        self.optimizer = subulp.AdamW(params, lr=1e-3, backend=setting.backend, stream=0)
        self._params = params
        self._made = 0

    def __call__(self) -> None:
        self._made += 1
        self.optimizer.param_groups[0]["lr"] = 1e-3 / self._made
        for p in self._params:
            room = torch.ones(p.numel() + 8 * self._made, dtype=BF16, device=p.device)
            p.grad = room[8 * self._made :].view(p.shape)
        self.optimizer.step()


def no_waits(setting: Setting) -> str:
    """Steps under torch's mode in which a synchronisation raises."""
    step = Steps(setting)
    step()
    setting.synchronize()
    on_device = setting.device.type != "cpu"
    if on_device:
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        if on_device:
            torch.cuda.set_sync_debug_mode("default")
    if not on_device:
        raise Skipped("the steps ran, but a CPU has no waits to find")
    return "new learning rates and new gradient addresses among the steps"


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels that Triton compiles, or loads from its cache on disk, meanwhile."""
    from triton import knobs

    found: list[str] = []

    def listener(*, src: Any, **_: Any) -> None:
        found.append(str(getattr(src, "name", src)))

    before = knobs.compilation.listener
    knobs.compilation.listener = listener
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def no_new_kernels(setting: Setting) -> str:
    """A changed step, learning rate, address, size and seed need no other kernel."""
    with compilations() as first:
        step = Steps(setting)
        step()
    with compilations() as later:
        step()
        step.optimizer.param_groups[0]["seed"] = 99
        step()
        Steps(setting, columns=8)()
    if later:
        raise Fault(f"compiled anew: {', '.join(later)}")
    if setting.device.type == "cpu":
        raise Skipped("the steps ran, but Triton's interpreter compiles nothing")
    return f"{len(first)} compiled or loaded at the first step, none later"


def no_recompilation(setting: Setting) -> str:
    """Steps inside torch.compile with other learning rates, where a recompilation raises."""
    step = Steps(setting)
    step()
    optimizer = step.optimizer
    torch._dynamo.reset()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    try:
        compiled()
        with torch.compiler.set_stance("fail_on_recompile"):
            for i in range(2 if setting.rehearsal else 20):
                optimizer.param_groups[0]["lr"] = 1e-3 / (i + 2)
                compiled()
    finally:
        torch._dynamo.reset()
    return "other learning rates"


def two_devices(setting: Setting) -> str:
    """One optimizer of parameters on two devices, neither of them the current one's alone."""
    if setting.device.type == "cpu" or torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    pair = [Parameter(normal((99,), 1).to(f"cuda:{i}")) for i in range(2)]
    optimizers = [subulp.AdamW(params, stream=0) for params in (pair, [Parameter(p.detach().cpu()) for p in pair])]
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    if any(same_bits(p, normal((99,), 1)) for p in pair):
        raise Fault("a parameter did not change")
    return require_equal(*(list(optimizer.param_groups[0]["params"]) for optimizer in optimizers))
