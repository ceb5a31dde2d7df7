"""Train one small language model four ways on real text, and show what storing it in bf16 costs.

The same model, text, batches and seed for four AdamW: all fp32; all bf16 rounded to nearest; bf16 with stochastic
rounding of the weight alone (OneTrainer's scheme); and subulp.AdamW, all bf16 with stochastic rounding of every store.
The gradients are computed in fp32 from the stored weights, so that only what is stored differs. Takes about three
minutes on two cores. Exit status: 0 done, 2 it could not start.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from subulp.lab.tiny_lm import BATCH, CONTEXT, load_text
from subulp.lab.training import FINAL_LR, PEAK_LR, Plan, Run, train_all
from subulp.lab.variants import BETAS, VARIANTS, WEIGHT_DECAY

STEPS = 3200
QUICK_STEPS = 200

LIMITS = (
    "What this does not show: larger models, other texts, several seeds (one seed tells gaps under about 0.01 from "
    "nothing), speed, the memory of activations, or bf16 arithmetic in the model itself (it runs in fp32 here)."
)
TOO_SHORT = "Under 1000 steps the second moment has hardly begun to stick: this run says nothing about bf16 states."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: shows that it runs, little else")
    parser.add_argument("--steps", type=_steps, help=f"training steps (default {STEPS})")
    parser.add_argument("--seed", type=_seed, default=0, help="of weights, batches and rounding (default 0)")
    parser.add_argument("--out", type=Path, default=Path("subulp-demo.png"), help="the picture (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Trains, prints the tables and writes the picture."""
    missing = [name for name in ("rich", "matplotlib") if find_spec(name) is None]
    if missing:
        return _refuse(f"`subulp demo` needs {' and '.join(missing)}: pip install 'subulp[demo]'")
    if not args.out.absolute().parent.is_dir():
        return _refuse(f"--out {args.out}: there is no folder {args.out.absolute().parent}. Make it, or name another.")
    _demo(_plan(args), args.out)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    return Plan(steps, args.seed, measures=8 if args.quick else 40, validation_sequences=64 if args.quick else 256)


def _demo(plan: Plan, out: Path) -> None:
    from rich.console import Console

    from subulp.lab import presentation

    # A pipe has no width of its own; the tables need about this much.
    console = Console(width=None if sys.stdout.isatty() else 110)
    text = load_text()
    runs = [Run(variant, text, plan) for variant in VARIANTS]
    parameters = sum(w.numel() for _, w in runs[0].weights)
    python = ".".join(platform.python_version_tuple()[:2])
    console.print(
        f"Text   the help topics of Python {python}, {text.size:,} bytes, SHA-256 {text.digest}\n"
        f"Model  transformer over bytes, {parameters:,} parameters, seed {plan.seed}\n"
        f"AdamW  lr {PEAK_LR:g} to {FINAL_LR:g} (cosine), betas {BETAS}, weight decay {WEIGHT_DECAY:g}\n"
        f"Steps  {plan.steps:,} of {BATCH} x {CONTEXT} bytes, the same for all four:\n",
        highlight=False,
    )
    for variant in VARIANTS:
        console.print(f"  [bold]{variant.name:<11}[/] {variant.description}", highlight=False)
    console.print()
    start = time.perf_counter()
    with presentation.Watch(console, runs, plan.steps) as watch:
        train_all(runs, text, plan, watch)
    console.print(presentation.curve_table(runs), "", presentation.final_table(runs), "")
    presentation.save_picture(runs, f"{parameters:,} parameters, {plan.steps} steps, seed {plan.seed}", out)
    if plan.steps < 1000:
        console.print(TOO_SHORT)
    console.print(LIMITS)
    console.print(f"{time.perf_counter() - start:.0f} s. Curves: {out}", highlight=False)


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _steps(value: str) -> int:
    steps = int(value)
    if steps < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be an integer >= 1.")
    return steps


def _seed(value: str) -> int:
    seed = int(value)
    if not 0 <= seed < 1 << 63:
        raise argparse.ArgumentTypeError(f"{value}: must be an integer in [0, 2**63).")
    return seed
