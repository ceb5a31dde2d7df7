"""The checks of scripts/gpu_check.py, with another CPU backend or Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import subulp
from subulp.lab.gpu import bits, capture, child, fresh, host, large
from subulp.lab.gpu.report import Fault, Skipped
from subulp.lab.gpu.setting import CPU, Setting, require_equal, same_bits
from subulp.lab.tensors import written
from subulp.numerics.layout import Layout

pytest.importorskip("triton")
pytest.importorskip("numba")

STANDIN = Setting(CPU, "numba", rehearsal=True)
INTERPRETER = Setting(CPU, "triton", rehearsal=True)

CHECKS: dict[str, Callable[[Setting], str]] = {
    "bits": partial(bits.compare, case=bits.CASES["AdamW bf16"]),
    "special values": bits.special_values,
    "large": partial(large.compare_windows, size=large.SMALL_SIZE),
    "capture": capture.replayed,
    "fresh": partial(fresh.compare, timeout=60.0),
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def _child_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "call", lambda setting, task, timeout: fresh.first_step(setting.device, setting.backend))


@pytest.mark.usefixtures("_child_in_this_process")
@pytest.mark.parametrize("name", CHECKS)
def test_a_right_backend_passes(name: str) -> None:
    CHECKS[name](STANDIN)


@pytest.mark.parametrize("name", ["bits", "capture", "large"])
def test_the_kernels_pass_in_tritons_interpreter(name: str) -> None:
    CHECKS[name](INTERPRETER)


@pytest.mark.usefixtures("_child_in_this_process")
@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_bits_are_found(name: str, tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right, done = subulp.AdamW.step, Event()

    def wrong(self: subulp.AdamW, closure: None = None) -> None:
        right(self, closure)
        if self.param_groups[0]["backend"] != "eager" and not done.is_set():
            written(self)[tensor].view(torch.int16).view(-1)[4::10] ^= (
                64  # half of the fraction: no later step hides it
            )
            done.set()

    monkeypatch.setattr(subulp.AdamW, "step", wrong)
    with pytest.raises(Fault, match=r"differ|has changed"):
        CHECKS[name](STANDIN)


@pytest.mark.parametrize("name", bits.CASES)
def test_every_case_of_bits_trains_what_it_says(name: str) -> None:
    case = bits.CASES[name]
    tensors = bits.trained(STANDIN, case, CPU, "eager")
    count = len(bits.SMALL_SHAPES)
    assert len(tensors) > count
    assert tensors[0].dtype == case.dtype
    assert require_equal(bits.trained(STANDIN, case, CPU, "numba"), tensors).startswith(f"{len(tensors)} tensors")
    assert any(t.data_ptr() % 16 for t in tensors)
    assert any(not t.is_contiguous() for t in tensors)
    others = [bits.trained(STANDIN, other, CPU, "eager") for key, other in bits.CASES.items() if key != name]
    assert not any(len(t) == len(tensors) and all(map(same_bits, t, tensors)) for t in others)


def test_the_rounding_functions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    bits.rounding_functions(STANDIN)
    calls: list[Tensor] = []

    def other_each_time(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
        calls.append(x)
        return x.to(dtype) * len(calls)

    monkeypatch.setattr(subulp, "round_stochastic", other_each_time)
    with pytest.raises(Fault, match="2 of 2"):
        bits.rounding_functions(STANDIN)


def test_bits_are_compared_as_such() -> None:
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan[:1], nan[1:])
    assert same_bits(nan[:1], nan[1:], any_nan=True)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.float())
    assert not same_bits(zero, zero[:1])
    assert same_bits(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    with pytest.raises(Fault, match="1 of 2 tensors"):
        require_equal([zero, zero], [zero, -zero])


def test_a_tensor_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "free_memory", lambda self: 1000)
    with pytest.raises(Skipped, match="needs 0 GiB"):
        large.compare_windows(STANDIN, 5000)


def test_the_windows_see_the_position_in_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel would whose indices wrap around: the noise of the upper part repeats that of the lower one."""
    monkeypatch.setattr(large, "Layout", lambda start, sizes, strides: Layout(start % 2048, sizes, strides))
    with pytest.raises(Fault, match="differ"):
        large.compare_windows(STANDIN, large.SMALL_SIZE)


class Waits:
    """torch's switch of the mode in which synchronisation raises, and what has been set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modes: list[str] = []
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.modes.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.modes.append("waited"))


def test_synchronisation_raises_in_the_checked_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which has no data: what is left is the host's part."""
    waits = Waits(monkeypatch)
    host.no_waits(Setting(torch.device("meta"), "eager", rehearsal=True))
    assert waits.modes == ["waited", "error", "default"]


def test_a_wait_fails_and_leaves_the_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    right = subulp.AdamW.step

    def step(self: subulp.AdamW, closure: None = None) -> None:
        if waits.modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        right(self, closure)

    monkeypatch.setattr(subulp.AdamW, "step", step)
    with pytest.raises(RuntimeError, match="synchronizing"):
        host.no_waits(Setting(torch.device("meta"), "eager", rehearsal=True))
    assert waits.modes[-1] == "default"


@pytest.mark.parametrize("check", [host.no_waits, host.no_new_kernels, host.two_devices])
def test_what_a_cpu_cannot_show_is_skipped(check: Callable[[Setting], str]) -> None:
    with pytest.raises(Skipped):
        check(STANDIN)


def test_a_kernel_that_is_compiled_later_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    assert knobs.compilation.listener is None
    right = subulp.AdamW.step
    compiled: set[int] = set()

    def step(self: subulp.AdamW, closure: None = None) -> None:
        right(self, closure)
        seed = self.param_groups[0]["seed"]
        if seed not in compiled:
            compiled.add(seed)
            source: Any = SimpleNamespace(name=f"kernel_{seed}")
            knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=False)

    monkeypatch.setattr(subulp.AdamW, "step", step)
    with pytest.raises(Fault, match=r"compiled anew: kernel_99$"):
        host.no_new_kernels(STANDIN)
    assert knobs.compilation.listener is None


def test_a_recompilation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host.no_recompilation(STANDIN)
    compile_for_one_rate = torch.compile

    def compiled(step: Callable[[], Any], backend: str) -> Any:
        inner = compile_for_one_rate(lambda rate: torch.ones(()) * rate, backend=backend, dynamic=False)
        rates = iter(range(100))
        return lambda: inner(float(next(rates)))

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(RuntimeError, match="recompile"):
        host.no_recompilation(STANDIN)


def test_a_child_prints_its_result_last(capsys: pytest.CaptureFixture[str]) -> None:
    child.main(["--dry-run", "first-step"])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == fresh.first_step(CPU, "eager")


def run_with(monkeypatch: pytest.MonkeyPatch, **result: Any) -> None:
    done = SimpleNamespace(**{"returncode": 0, "stdout": "", "stderr": "", **result})
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, returncode=1, stderr="Traceback\nOSError: no driver\n")
    with pytest.raises(RuntimeError, match=r"^OSError: no driver$"):
        child.call(STANDIN, "first-step", timeout=1.0)
    run_with(monkeypatch, returncode=-11)
    with pytest.raises(RuntimeError, match=r"^exit status -11$"):
        child.call(STANDIN, "first-step", timeout=1.0)
    run_with(monkeypatch, stdout='a warning\n{"x": 1}\n')
    assert child.call(STANDIN, "time", "subulp", timeout=1.0) == {"x": 1}


@pytest.mark.slow
def test_triton_tells_of_every_compilation() -> None:
    """The real compiler, in a process without the interpreter."""
    program = (
        "from subulp.lab.gpu.host import compilations\n"
        "from tests.backends.triton_aot import compile_for\n"
        "with compilations() as found:\n"
        "    compile_for('sm_90', 'lerp')\n"
        "    compile_for('sm_90', 'lerp')\n"
        "print(found)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "['update', 'update']"
