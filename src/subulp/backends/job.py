"""One tensor's share of an update, as every backend receives it."""

from __future__ import annotations

from dataclasses import dataclass

from subulp.numerics.views import Views


@dataclass
class Job:
    """The views of one target and its companions, with what the noise and the formula need."""

    views: Views
    stream: int
    step: int
    scalars: tuple[float, ...]
