"""Deliberate faults for ``scripts/mutants.py``: what a test suite that checks the promises has to notice.

Each replaces a string that occurs once in its file. Left out is what no test can see: conditions that others imply (a plan
compares identities and addresses, but takes the present addresses of tensors whose sizes and dtypes it has compared), and
what only costs time (alias metadata, table sizes).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old`` becomes ``new`` in ``file`` (below src/subulp); ``tests`` (below tests) should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The source with the fault. Raises ValueError where the source has changed, so that the fault no longer fits."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {found} times in {self.file}, not once: write it anew.")
        return source.replace(self.old, self.new)


def faults(file: str, tests: str, *entries: tuple[str, str, str]) -> list[Mutant]:
    """The mutants of a file, each as (name, old, new); ``tests`` are separated by spaces."""
    return [Mutant(name, file, old, new, tuple(tests.split())) for name, old, new in entries]


def all_mutants() -> list[Mutant]:
    from faults import arithmetic, formulas, host, kernels, parts

    return [*parts.MUTANTS, *formulas.MUTANTS, *arithmetic.MUTANTS, *kernels.MUTANTS, *host.MUTANTS]
