"""Whether the tests notice faults: applies those of ``scripts/faults`` to a copy of the project, one at a time.

    python scripts/mutants.py                  the tests that should notice each fault
    python scripts/mutants.py --fast           then, where they did not, the fast suite
    python scripts/mutants.py --full           then everything
    python scripts/mutants.py -k adam -j 2     the faults whose name or file matches "adam", two at a time
    python scripts/mutants.py --list

A fault is noticed (killed) when pytest fails or takes longer than allowed. One that survives needs a test, and makes the exit
code 1. The tests are run on the unchanged copy first: faults say nothing where they fail anyway.

Why no mutation testing library does this:

* mutmut 3 puts all mutants of a function behind a trampoline that calls the chosen one. Formulas and kernels are taken apart
  here (``types.FunctionType(f.__code__, ...)``, ``numba.njit``, ``triton.jit``), and would find the trampoline.
* Cosmic Ray changes the file itself, which suits. But its operators know syntax alone: they give thousands of mutants for
  these sources, many of them equivalent, with one command for all; at a minute for those that need kernels compiled, a run
  takes days. The faults of interest (a denominator without its maximum, a condition of a plan, a key without its high word)
  replace terms and arguments: each would be an operator of our own, and each knows the tests that should notice it.

Numba's cache cannot hide a fault: the copies have paths of their own, and each run gets a fresh copy of the cache that the
unchanged copy filled. Its entries are found by path and date of the file, and by the content of the sources
(``kernel._content_key``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from faults import Mutant, all_mutants

ROOT = Path(__file__).parents[1]
EVERYTHING = ["-m", "slow or not slow"]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "shared", "build", "dist", "*.egg-info")


FORKS = multiprocessing.get_context("forkserver")
# Importing these would be most of a run's time. Nothing of the project, and no Triton: its tests choose how it is imported.
FORKS.set_forkserver_preload(["torch", "numba", "pytest", "scipy.stats"])


def _pytest(root: Path, cache: Path, said: Path, arguments: list[str]) -> None:
    """Runs pytest in a copy of the project, as the process's whole work."""
    os.setsid()  # so that what it starts can be killed with it
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root / "src"), "NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # a changed file of equal size and date would be hidden by its compiled form
    sys.path[:0] = [str(root / "src"), str(root)]
    import numba
    import pytest

    numba.config.reload_config()  # type: ignore[no-untyped-call]
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])))


class Copy:
    """A copy of the project in which one fault at a time is tested."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root.with_name(f"{root.name}-cache")
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        self.cache.mkdir()
        self.said = ""

    def pytest(self, arguments: list[str], cache: Path, limit: float) -> int | None:
        """The exit code; None if it took longer than ``limit`` seconds."""
        said = self.root.with_name(f"{self.root.name}-said")
        process = FORKS.Process(target=_pytest, args=(self.root, cache, said, arguments))
        process.start()
        process.join(limit)
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return None
        self.said = said.read_text()
        return process.exitcode

    def check_unchanged(self, tests: list[str], limit: float) -> None:
        """Fills the cache, and exits if a test fails without any fault."""
        if self.pytest(tests, self.cache, limit) != 0:
            raise SystemExit(
                f"{self.said[-4000:]}\nWithout any fault these tests fail or take longer than {limit:.0f} s."
            )

    def survives(self, mutant: Mutant, stages: list[tuple[list[str], float]]) -> bool:
        """Whether no stage (arguments of pytest, seconds) notices the fault."""
        file = self.root / "src" / "subulp" / mutant.file
        original, status = file.read_text(), file.stat()
        with tempfile.TemporaryDirectory(dir=self.root.parent) as directory:
            cache = Path(directory) / "cache"
            shutil.copytree(self.cache, cache)
            file.write_text(mutant.apply(original))
            try:
                for arguments, limit in stages:
                    code = self.pytest(arguments, cache, limit)
                    if code in (4, 5):
                        raise SystemExit(f"{self.said[-2000:]}\n{mutant.name}: pytest finds no such tests.")
                    if code != 0:
                        return False
                return True
            finally:
                file.write_text(original)
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # what the cache goes by


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether the tests notice deliberate faults.")
    parser.add_argument("-k", default="", metavar="PATTERN", help="only faults whose name or file matches")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument(
        "--fast", action="store_true", help="the fast suite for what the tests of a fault do not notice"
    )
    parser.add_argument("--full", action="store_true", help="then the whole suite")
    parser.add_argument("--list", action="store_true", help="only name the faults")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for the tests of one fault")
    options = parser.parse_args()
    chosen = [mutant for mutant in all_mutants() if re.search(options.k, f"{mutant.name} {mutant.file}")]
    if options.list or not chosen:
        print(*(f"{m.name:44} {m.file:28} {' '.join(m.tests)}" for m in chosen), sep="\n")
        return 0 if chosen else 2
    for mutant in chosen:
        mutant.apply((ROOT / "src" / "subulp" / mutant.file).read_text())
    # Suites get what they take without a fault on a slow machine: ten minutes and an hour, and as much again.
    further: list[tuple[list[str], float]] = [([], 1200.0)] * (options.fast or options.full) + [
        (EVERYTHING, 7200.0)
    ] * options.full
    tests = sorted({f"tests/{test}" for mutant in chosen for test in mutant.tests})
    survivors = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="subulp-mutants-") as directory:
        copies = [Copy(Path(directory) / str(i)) for i in range(max(1, options.j))]
        free: queue.Queue[Copy] = queue.Queue()

        def prepare(copy: Copy) -> None:
            copy.check_unchanged(tests, 10 * options.limit)
            free.put(copy)

        def run(mutant: Mutant) -> tuple[Mutant, bool, float]:
            copy = free.get()
            start = time.monotonic()
            try:
                own = [f"tests/{test}" for test in mutant.tests]
                survived = copy.survives(mutant, [(own, options.limit), *further])
            finally:
                free.put(copy)
            return mutant, survived, time.monotonic() - start

        with ThreadPoolExecutor(len(copies)) as pool:
            list(pool.map(prepare, copies))
            for mutant, survived, seconds in pool.map(run, chosen):
                print(f"{'SURVIVED' if survived else 'killed':8} {seconds:6.0f} s  {mutant.name}", flush=True)
                if survived:
                    survivors.append(mutant)
    print(f"{len(chosen)} faults, {len(survivors)} survived, {time.monotonic() - began:.0f} s")
    for mutant in survivors:
        print(f"  {mutant.name}: {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
