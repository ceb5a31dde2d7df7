"""Digests of the bits that training runs store, in recorded_bits.json: the bits of a release, kept for those after it.

Every other test compares the library with itself as it is, or with a reference in another precision. A change that alters
all backends alike passes those; here it does not. So a refactoring is known to keep every stored bit, and a change of bits
is a decision: a changed digest is a breaking change, to be announced in CHANGELOG.md with **bits**.

    python -m tests.recorded_bits [--backend numba]     compares all cases with the table
    python -m tests.recorded_bits --renew               writes the table and prints what has changed

The inputs are multiples of powers of two made from integers, since torch's random numbers and BLAS promise no bits.

Left out: weights of Muon's matrices (products by BLAS); fp64 and complex128, which no kernel serves and nothing rounds.
Scalars such as beta**step come from the C library's pow: another one could in rare cases change an fp32 scalar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import subulp
from tests.recorded_functions import FUNCTIONS
from tests.recorded_runs import RUNS

TABLE = Path(__file__).with_name("recorded_bits.json")

CASES: dict[str, Callable[[str], Iterator[tuple[str, Tensor]]]] = {**RUNS, **FUNCTIONS}
"""Each gives its named tensors for a backend, "eager" or "numba"."""


def digest(case: str, backend: str) -> str:
    """Of names, dtypes, shapes and bits; a NaN counts as one with its sign, since its other bits are not promised."""
    found = hashlib.blake2b(digest_size=8)
    for name, t in CASES[case](backend):
        found.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        found.update(_canonical(t).numpy().tobytes())
    return found.hexdigest()


def _canonical(t: Tensor) -> Tensor:
    t = (torch.view_as_real(t) if t.is_complex() else t).detach().contiguous()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    code = t.view(kind)
    nan = t.double().isnan()
    return torch.where(nan, torch.where(code < 0, -1, torch.iinfo(kind).max).to(kind), code)


def recorded() -> dict[str, str]:
    """The table."""
    table: dict[str, str] = json.loads(TABLE.read_text())
    return table


def main() -> int:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded_bits")
    parser.add_argument("--renew", action="store_true", help="write the table, by the eager backend")
    parser.add_argument("--backend", choices=("eager", "numba"), default="eager")
    parser.add_argument("cases", nargs="*", help="parts of the names of cases to compare (default: all)")
    chosen = parser.parse_args()
    if chosen.renew and (chosen.cases or chosen.backend != "eager"):
        parser.error("--renew records every case with the eager backend.")
    before = recorded() if TABLE.exists() else {}
    names = [name for name in CASES if not chosen.cases or any(part in name for part in chosen.cases)]
    after = {name: digest(name, chosen.backend) for name in names}
    gone = [] if chosen.cases else [name for name in before if name not in after]
    changed = [name for name in names if before.get(name) != after[name]]
    for name in changed:
        print(f"{name}: {before.get(name, 'new')} -> {after[name]}")
    for name in gone:
        print(f"{name}: {before[name]} -> no such case")
    print(f"{len(names)} cases, {len(changed)} differ or are new, {len(gone)} gone; subulp is {subulp.__file__}")
    if chosen.renew:
        TABLE.write_text(json.dumps(after, indent=0) + "\n")
        return 0
    return 1 if changed or gone else 0


if __name__ == "__main__":
    sys.exit(main())
