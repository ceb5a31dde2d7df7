"""Every peer timed in a process of its own, and the goals for subulp."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import partial

from subulp.lab.bench.stream import BYTES
from subulp.lab.gpu import child, timing
from subulp.lab.gpu.peers import OURS, PEERS, YARDSTICK
from subulp.lab.gpu.report import Fault, Report, Skipped
from subulp.lab.gpu.setting import Setting
from subulp.lab.gpu.timing import BIG, SMALL

LEAST = 15.0
"""Seconds that must be left for a timing to begin."""
MOST = 50.0
"""Seconds that one peer may take."""

Times = Mapping[str, list[float]]

GOALS = (
    "goal, 1 B parameters: at least 90 % of copy bandwidth",
    "goal, 1 B parameters: at most 1.05 of torch fused",
    "goal, 2000 small tensors: at most 1.0 of torch fused",
)


def section(setting: Setting, report: Report) -> None:
    """Timings are printed and not counted; the goals are checks."""
    if report.out_of_time("speed", LEAST):
        for goal in GOALS:
            report.skip(goal, "nothing was timed")
        return
    bandwidth = timing.copy_bandwidth(setting)
    setting.release()
    report.note(f"device copy: {bandwidth / 1e9:.0f} GB/s (read + written)")
    measured: dict[str, Times] = {}
    for name in PEERS:
        times = timed(setting, report, name)
        if times is not None:
            measured[name] = times
            for line in lines(name, times, bandwidth):
                report.note(line)
    for goal in GOALS:
        report.check(goal, partial(judge, setting, goal, measured, bandwidth), least=0.0)


def timed(setting: Setting, report: Report, name: str) -> Times | None:
    """The times of a peer; None, with its reason printed, if there are none. Only what the goals are about may fail."""
    told = report.fail if name.startswith(OURS) or name == YARDSTICK else report.skip
    title = f"time of {name}"
    missing = PEERS[name].missing()
    if missing is not None:
        report.skip(title, missing)
        return None
    if report.out_of_time(title, LEAST):
        return None
    seconds = min(MOST, report.budget.left() - 5.0)
    try:
        times: Times = child.call(setting, "time", name, timeout=seconds)
    except subprocess.TimeoutExpired:
        (told if seconds == MOST else report.skip)(title, f"no result within {seconds:.0f} s")
        return None
    except Exception as error:  # Whatever a peer does is its own result.
        told(title, str(error)[:200])
        return None
    return times


def lines(name: str, times: Times, bandwidth: float) -> list[str]:
    """A line for each workload."""
    return [
        f"{name:16} {workload:6} {count / 1e6:8.1f} M  {seconds * 1e3:9.3f} ms  "
        f"{BYTES * count / seconds / bandwidth:6.1%} of copy at {BYTES} B"
        for workload, (count, seconds) in times.items()
    ]


def judge(setting: Setting, goal: str, measured: Mapping[str, Times], bandwidth: float) -> str:
    """Whether a goal is met."""
    if setting.rehearsal:
        raise Skipped("not judged in a rehearsal")
    if OURS not in measured or YARDSTICK not in measured:
        raise Skipped(f"needs the times of {OURS} and of {YARDSTICK}")
    ours, fused = measured[OURS], measured[YARDSTICK]
    count, seconds = ours[BIG]
    share = BYTES * count / seconds / bandwidth
    big, small = (ours[name][1] / fused[name][1] for name in (BIG, SMALL))
    met, value = {
        GOALS[0]: (share >= 0.9, f"{share:.1%}"),
        GOALS[1]: (big <= 1.05, f"{big:.3f}"),
        GOALS[2]: (small <= 1.0, f"{small:.3f}"),
    }[goal]
    if not met:
        raise Fault(value)
    return value
