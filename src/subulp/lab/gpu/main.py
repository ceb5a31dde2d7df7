"""The command line of ``scripts/gpu_check.py``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

import torch

import subulp
from subulp.lab.gpu import bits, capture, fresh, host, large, speed
from subulp.lab.gpu.budget import Budget, Watchdog
from subulp.lab.gpu.child import DRY_RUN, setting_of
from subulp.lab.gpu.report import Report
from subulp.lab.gpu.setting import Setting

SECTIONS: dict[str, Callable[[Setting, Report], None]] = {
    "bits": bits.section,
    "fresh": fresh.section,
    "large": large.section,
    "capture": capture.section,
    "host": host.section,
    "speed": speed.section,
}

LIMIT = 225.0
"""Seconds; what has begun by then may end."""
END = 238.0
"""Seconds after which a check that hangs ends the process."""


def main(description: str, argv: Sequence[str] | None = None, started: float | None = None) -> int:
    """Runs the chosen sections and returns the exit status: 0 all passed, 1 a check failed, 2 there is no GPU.

    Args:
        description: of the command.
        argv: its arguments; None: the process's.
        started: when the process began, by ``time.monotonic``; None: now.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument(DRY_RUN, action="store_true", help="on a CPU in Triton's interpreter, small, judges no speed")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error(f"there is no CUDA or ROCm device here; {DRY_RUN} runs the script's own logic on a CPU")
    import triton

    budget = Budget(LIMIT, time.monotonic() if started is None else started)
    report = Report(budget)
    where = "CPU, Triton's interpreter" if options.dry_run else torch.cuda.get_device_name()
    print(f"subulp {subulp.__version__}, torch {torch.__version__}, triton {triton.__version__}, {where}", flush=True)
    with Watchdog(END - budget.used(), lambda: give_up(report)):
        run(setting_of(options.dry_run), report, options.sections or list(SECTIONS))
    return report.finish()


def run(setting: Setting, report: Report, sections: Sequence[str]) -> None:
    """Each section once, in the order of SECTIONS; what none of the checks expects is a failed check."""
    for name, section in SECTIONS.items():
        if name in sections:
            try:
                section(setting, report)
            except Exception as error:
                report.fail(f"section {name}", f"{type(error).__name__}: {error}")


def give_up(report: Report, leave: Callable[[int], object] = os._exit) -> None:
    """Fails the check that is running and ends the process, whatever its threads wait for."""
    report.fail(report.current or "the script", f"has not ended after {report.budget.used():.0f} s")
    leave(report.finish())
