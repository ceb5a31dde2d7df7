"""A line for every check, and how many passed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from subulp.lab.gpu.budget import Budget

LEAST = 5.0
"""Seconds that must be left for a check to begin."""


class Fault(Exception):  # noqa: N818  it is what is checked that is in error
    """What a check finds wrong."""


class Skipped(Exception):  # noqa: N818  no error
    """Why a check cannot say anything here."""


class Report:
    """Runs checks while there is time, prints their outcomes and counts them. What was skipped counts as neither."""

    def __init__(self, budget: Budget, write: Callable[[str], None] | None = None) -> None:
        self.budget = budget
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.current: str | None = None
        """The check that is running."""
        self._write = write or (lambda line: print(line, flush=True))

    def check(self, name: str, body: Callable[[], str | None], least: float = LEAST) -> None:
        """Runs one check, if ``least`` seconds are left: ``body`` returns a detail to print, or raises."""
        if self.out_of_time(name, least):
            return
        self.current = name
        try:
            detail = body()
        except Skipped as reason:
            self.skip(name, str(reason))
        except Fault as fault:
            self.fail(name, str(fault))
        except Exception as error:  # A check that raises has failed; the others go on.
            traceback.print_exc(file=sys.stderr)
            self.fail(name, f"{type(error).__name__}: {error}")
        else:
            self.passed.append(name)
            self._line("ok  ", name, detail or "")
        self.current = None

    def out_of_time(self, name: str, least: float = LEAST) -> bool:
        """Whether fewer than ``least`` seconds are left; the name is skipped then."""
        if self.budget.left() >= least:
            return False
        self.skip(name, "no time left")
        return True

    def skip(self, name: str, reason: str) -> None:
        """Names what was not checked."""
        self.skipped.append(name)
        self._line("skip", name, reason)

    def fail(self, name: str, reason: str) -> None:
        """Names what is wrong."""
        self.failed.append(name)
        self._line("FAIL", name, reason)

    def note(self, text: str) -> None:
        """Prints what is no check."""
        self._write(f"     {text}")

    def finish(self) -> int:
        """Prints the totals and returns the exit status: 1 if a check failed."""
        if self.skipped:
            self._write(f"skipped: {', '.join(self.skipped)}")
        self._write(f"{self.budget.used():.0f} s")
        self._write(f"{len(self.passed)} passed, {len(self.failed)} failed")
        return 1 if self.failed else 0

    def _line(self, outcome: str, name: str, detail: str) -> None:
        self._write(f"{outcome} {name}{': ' * bool(detail)}{detail}")
