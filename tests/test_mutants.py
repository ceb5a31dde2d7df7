"""The list of deliberate faults (scripts/mutants.py) fits the sources of today."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_fault_applies_once_and_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from faults import all_mutants

    mutants = all_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60
    files = {file: (ROOT / "src" / "subulp" / file).read_text() for file in {mutant.file for mutant in mutants}}
    wrong = []
    for mutant in mutants:
        try:
            ast.parse(mutant.apply(files[mutant.file]))
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
        wrong += [f"{mutant.name}: no tests/{test}" for test in mutant.tests if not (ROOT / "tests" / test).exists()]
    assert not wrong, "\n".join(wrong)
