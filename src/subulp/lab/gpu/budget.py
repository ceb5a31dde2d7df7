"""The time that everything together may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer
from types import TracebackType


class Budget:
    """Seconds that are left of ``limit`` since ``started``."""

    def __init__(self, limit: float, started: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = started + limit
        self._started = started
        self._clock = clock

    def left(self) -> float:
        """Seconds; negative when it is overspent."""
        return self._end - self._clock()

    def used(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started


class Watchdog:
    """Calls ``give_up`` if its body has not ended after so many seconds: a kernel that hangs cannot be interrupted."""

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._timer = Timer(max(seconds, 0.0), give_up)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
