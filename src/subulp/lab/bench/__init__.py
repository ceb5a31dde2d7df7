"""Time one optimizer step against every other implementation that is installed, side by side in one run.

`subulp bench step` times AdamW on bf16 tensors (weights, gradients, both moments) and compares: the median and the least
time, useful bandwidth, the time of the same memory traffic without an optimizer, torch's fused AdamW, and the peak extra
memory of a step. An implementation whose first steps differ from fp64 by more than its own rounding allows gets no
figures. Exit status: 0 done, 1 a result of subulp is wrong, 2 it could not start.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from subulp.lab.bench.machine import describe_machine
from subulp.lab.bench.peers import IMPLEMENTATIONS
from subulp.lab.bench.workloads import WORKLOADS

GIBIBYTE = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the benchmarks and their options."""
    step = parser.add_subparsers(required=True, metavar="BENCHMARK").add_parser("step", help="time one optimizer step")
    by_default = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.by_default]
    step.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all", metavar="NAME"
    )
    step.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=by_default,
        help=f"of {', '.join(IMPLEMENTATIONS)} (default: all but subulp-eager)",
        metavar="NAME",
    )
    step.add_argument("--rounds", type=_positive, default=20, help="timed steps of each (default 20)")
    step.add_argument("--threads", type=_positive, default=_usable_cores(), help="default: the usable cores")
    step.add_argument("--seed", type=int, default=0, help="of weights, gradients and the order (default 0)")
    step.add_argument(
        "--memory-budget",
        type=_positive,
        default=6,
        help="GiB of parameters and states at a time (default 6); what does not fit is timed in several parts",
        metavar="GIB",
    )
    step.add_argument("--no-peak-memory", action="store_true", help="skip the processes that measure peak memory")
    step.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the results (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table for each workload, and writes step.csv and step.png."""
    from subulp.lab.bench.measure import Settings, measure
    from subulp.lab.bench.report import as_markdown, save_picture, write_csv

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {args.out}: cannot make this folder ({error}). Name another.", file=sys.stderr)
        return 2
    machine = describe_machine(args.threads, args.seed)
    print("; ".join(f"{key} {value}" for key, value in machine.items() if value), end="\n\n")
    settings = Settings(
        args.rounds, args.threads, args.seed, args.memory_budget * GIBIBYTE, peak_memory=not args.no_peak_memory
    )
    chosen = [IMPLEMENTATIONS[name] for name in dict.fromkeys(args.implementations)]
    results = []
    for name in dict.fromkeys(args.workloads):
        results.append((WORKLOADS[name], measure(WORKLOADS[name], chosen, settings, _say)))
        print(as_markdown(*results[-1]), end="\n\n", flush=True)
        # After each workload, so that an interrupted run keeps what it has.
        write_csv(args.out / "step.csv", machine, results)
    if find_spec("matplotlib") is not None:
        save_picture(args.out / "step.png", machine, results)
    else:
        _say("no picture: pip install 'subulp[demo]' brings matplotlib")
    wrong = [r.name for _, rows in results for r in rows if r.name.startswith("subulp") and r.refusal is not None]
    return 1 if wrong else 0


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be an integer >= 1.")
    return number


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
