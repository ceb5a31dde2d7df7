"""What scripts/gpu_check.py prints and returns: counts, the time budget, timings and goals."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from subulp.lab.gpu import child, peers, speed, timing
from subulp.lab.gpu import main as gpu
from subulp.lab.gpu.budget import Budget, Watchdog
from subulp.lab.gpu.report import Fault, Report, Skipped
from subulp.lab.gpu.setting import CPU, Setting

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
REHEARSAL = Setting(CPU, "numba", rehearsal=True)
GPU = Setting(torch.device("cuda"))


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Printed:
    """A report with a clock of its own and its lines."""

    def __init__(self, limit: float = 225.0) -> None:
        self.clock = Clock()
        self.lines: list[str] = []
        self.report = Report(Budget(limit, self.clock.now, self.clock), self.lines.append)


def fault() -> str:
    raise Fault("other bits")


def skipped() -> str:
    raise Skipped("no such device")


def broken() -> str:
    raise OSError("no driver")


def test_each_check_has_a_line_and_the_last_one_counts() -> None:
    printed = Printed()
    report = printed.report
    for name, body in {"a": lambda: "12 tensors", "b": lambda: None, "c": fault, "d": skipped, "e": broken}.items():
        report.check(name, body)
    report.note("1 GB/s")
    assert report.finish() == 1
    assert printed.lines == [
        "ok   a: 12 tensors",
        "ok   b",
        "FAIL c: other bits",
        "skip d: no such device",
        "FAIL e: OSError: no driver",
        "     1 GB/s",
        "skipped: d",
        "0 s",
        "2 passed, 2 failed",
    ]


def test_what_is_skipped_neither_passes_nor_fails() -> None:
    printed = Printed()
    printed.report.check("d", skipped)
    assert printed.report.finish() == 0
    assert printed.lines[-1] == "0 passed, 0 failed"


def test_without_time_a_check_does_not_begin() -> None:
    printed = Printed(limit=30.0)
    printed.report.check("long", lambda: "ran", least=31.0)
    printed.clock.now += 25.1
    printed.report.check("short", lambda: "ran")
    printed.clock.now -= 0.2
    printed.report.check("in time", lambda: "ran")
    assert printed.lines == ["skip long: no time left", "skip short: no time left", "ok   in time: ran"]
    assert printed.report.skipped == ["long", "short"]


def test_without_time_the_timings_and_goals_are_named_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copy_bandwidth", lambda setting: 1e12)
    spent = Printed(limit=10.0)
    speed.section(GPU, spent.report)
    assert spent.report.skipped == ["speed", *speed.GOALS]
    assert spent.report.finish() == 0
    assert spent.lines[-1] == "0 passed, 0 failed"

    printed = Printed(limit=100.0)

    def slow(setting: Setting, task: str, name: str, timeout: float) -> Any:
        printed.clock.now += 50.0
        return {timing.BIG: [1e9, 0.02], timing.SMALL: [2e6, 1e-4]}

    monkeypatch.setattr(child, "call", slow)
    monkeypatch.setattr(peers.Peer, "missing", lambda self: None)
    speed.section(GPU, printed.report)
    names = list(peers.PEERS)
    assert printed.report.skipped == [f"time of {name}" for name in names[2:]]
    assert [line for line in printed.lines if line.startswith("skip")] == [
        f"skip time of {name}: no time left" for name in names[2:]
    ]
    assert not set(printed.report.passed) - set(speed.GOALS)


def test_what_the_goals_need_is_timed_first() -> None:
    assert list(peers.PEERS)[:2] == [peers.OURS, peers.YARDSTICK]


def test_peers_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speed,
        "PEERS",
        {name: peers.Peer(peer.make, "no_such_module", peer.distribution) for name, peer in peers.PEERS.items()},
    )
    printed = Printed()
    for name in ("torchao", "flashoptim", "heavyball"):
        assert speed.timed(REHEARSAL, printed.report, name) is None
    assert printed.lines == [
        f"skip time of {name}: not installed: pip install --no-deps {name}"
        for name in ("torchao", "flashoptim", "heavyball")
    ]


@pytest.mark.parametrize(
    ("error", "left", "said"),
    [
        (RuntimeError("OutOfMemoryError: 80 GiB"), 225.0, "OutOfMemoryError: 80 GiB"),
        (subprocess.TimeoutExpired("python", 50.0), 225.0, "no result within 50 s"),
        (subprocess.TimeoutExpired("python", 15.0), 20.0, "no result within 15 s"),
    ],
)
@pytest.mark.parametrize("name", ["subulp", "torch foreach"])
def test_a_timing_that_fails(
    name: str, error: Exception, left: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ours it is a fault, unless time ran short; of a peer it is its own affair."""

    def call(setting: Setting, task: str, peer: str, timeout: float) -> Any:
        raise error

    monkeypatch.setattr(child, "call", call)
    printed = Printed(limit=left)
    assert speed.timed(GPU, printed.report, name) is None
    outcome = "FAIL" if name == "subulp" and left > 20 else "skip"
    assert printed.lines == [f"{outcome} time of {name}: {said}"]


# At 14 bytes and 1 TB/s 1e9 parameters take 14 ms.
FUSED = {timing.BIG: [1e9, 0.0150], timing.SMALL: [2e6, 1e-4]}


@pytest.mark.parametrize(
    ("big", "small", "met"),
    [
        (0.0150, 1e-4, [True, True, True]),
        (0.0156, 1e-4, [False, True, True]),
        (0.0158, 1e-4, [False, False, True]),
        (0.0141, 1.01e-4, [True, True, False]),
    ],
)
def test_goals(big: float, small: float, met: list[bool]) -> None:
    ours = {timing.BIG: [1e9, big], timing.SMALL: [2e6, small]}
    printed = Printed()
    measured = {peers.OURS: ours, peers.YARDSTICK: FUSED}
    for goal in speed.GOALS:
        printed.report.check(goal, lambda goal=goal: speed.judge(GPU, goal, measured, 1e12))
    assert [goal in printed.report.passed for goal in speed.GOALS] == met
    assert len(printed.report.failed) == met.count(False)
    assert speed.lines("subulp", {timing.BIG: [1e9, 0.0140]}, 1e12) == [
        "subulp           1 B      1000.0 M     14.000 ms  100.0% of copy at 14 B"
    ]


def test_goals_without_their_times_are_skipped() -> None:
    for setting, measured in ((GPU, {peers.OURS: FUSED}), (REHEARSAL, {peers.OURS: FUSED, peers.YARDSTICK: FUSED})):
        with pytest.raises(Skipped):
            speed.judge(setting, speed.GOALS[0], measured, 1e12)


def test_every_installed_peer_is_timed_on_its_workloads() -> None:
    for name, peer in peers.PEERS.items():
        if peer.missing() is None and name != "flashoptim":
            times = timing.time_peer(REHEARSAL, name)
            assert list(times) == [workload.name for workload in timing.workloads(REHEARSAL) if peer.serves(workload)]
            assert all(seconds > 0 for _, seconds in times.values())


def test_the_workloads_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 << 30, 140 << 30))
    big, small, llama = timing.workloads(GPU)
    assert big.elements == 1_006_632_960
    assert (len(small.shapes), small.elements) == (2000, 2_048_000)
    assert llama.elements == 6_738_415_616  # Llama 7 B as released
    assert peers.PEERS["heavyball"].serves(big)
    assert not peers.PEERS["heavyball"].serves(small)


@pytest.mark.parametrize("gibibytes", [1, 24, 80])
def test_layers_are_left_out_where_memory_is_short(gibibytes: int) -> None:
    workload = timing.llama_like(float(gibibytes << 30))
    layers = (len(workload.shapes) - 3) // 9
    fits = 16 * workload.elements <= 0.8 * (gibibytes << 30)
    assert fits == (gibibytes > 1)
    assert layers == {1: 1, 24: 5, 80: 19}[gibibytes]


def test_a_hanging_check_ends_the_process() -> None:
    printed, left = Printed(), Event()
    status: list[int] = []

    def leave(code: int) -> None:
        status.append(code)
        left.set()

    def hang() -> str:
        assert left.wait(timeout=30)
        return "too late"

    with Watchdog(0.05, lambda: gpu.give_up(printed.report, leave)):
        printed.report.check("capture", hang)
    assert status == [1]
    assert printed.lines[:3] == ["FAIL capture: has not ended after 0 s", "0 s", "0 passed, 1 failed"]


def test_a_watchdog_that_was_not_needed_does_nothing() -> None:
    called = Event()
    with Watchdog(0.2, called.set):
        pass
    assert not called.wait(timeout=0.4)


def test_a_section_that_raises_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Printed()

    def section(setting: Setting, report: Report) -> None:
        report.check("inner", lambda: "")
        raise OSError("no driver")

    monkeypatch.setattr(gpu, "SECTIONS", {"one": section, "two": section, "three": section})
    gpu.run(REHEARSAL, printed.report, ["three", "one"])
    assert printed.lines[::2] == ["ok   inner"] * 2
    assert printed.lines[1::2] == [f"FAIL section {name}: OSError: no driver" for name in ("one", "three")]


@pytest.fixture
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.mark.usefixtures("_interpreter")
def test_a_dry_run_of_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main("", ["--dry-run", "large"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("CPU, Triton's interpreter")
    assert lines[1].startswith("ok   5000 elements: 4 windows of 1000 elements")
    assert lines[-1] == "1 passed, 0 failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main("", [])
    assert ended.value.code == 2
    assert "no CUDA or ROCm device here; --dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_dry_run_passes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"19 passed, 0 failed", lines[-1])
    assert sum(line.startswith("ok ") for line in lines) == 19
    assert sum("of copy at 14 B" in line for line in lines) >= 12
    assert f"skip {speed.GOALS[0]}: not judged in a rehearsal" in lines
