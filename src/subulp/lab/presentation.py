"""What the demo shows: live progress, the tables and the picture. Needs rich and matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from subulp.lab.training import Measure, Run

COLOURS = ("#222222", "#d1495b", "#e09f3e", "#2a7fba")
STYLES = ("-", "-", "-", (0, (4, 2)))
WIDTHS = (3.2, 1.8, 1.8, 1.8)
"""The reference is broad, so that a curve on top of it stays visible."""


class Watch:
    """Live progress on a terminal; elsewhere a line at every tenth of the way."""

    def __init__(self, console: Console, runs: Sequence[Run], steps: int) -> None:
        self._console = console
        self._runs = runs
        self._steps = steps
        self._tenths = 0
        self._progress = Progress(
            TextColumn("training four models"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps)
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self) -> None:
        """Shows how far the slowest run is."""
        done = min(run.steps_done for run in self._runs)
        self._progress.update(self._task, completed=done)
        if self._console.is_terminal:
            self._live.update(Group(self._progress, self._now()))
        elif done * 10 // self._steps > self._tenths:
            self._tenths = done * 10 // self._steps
            self._console.print(f"step {done} of {self._steps}{self._losses()}", highlight=False, soft_wrap=True)

    def _losses(self) -> str:
        """The losses at the last step that all runs have measured."""
        common = min(len(run.measures) for run in self._runs)
        if common == 0:
            return ""
        measures = [(run.variant.name, run.measures[common - 1]) for run in self._runs]
        losses = ", ".join(f"{name} {measure.validation_loss:.4f}" for name, measure in measures)
        return f"; validation loss at {measures[0][1].step}: {losses}"

    def _now(self) -> Table:
        table = Table(box=None, padding=(0, 2))
        for column in ("", "step", "validation loss", "exp_avg_sq / exact"):
            table.add_column(column, justify="left" if not column else "right")
        for run in self._runs:
            loss = f"{run.measures[-1].validation_loss:.4f}" if run.measures else "-"
            ratio = f"{exactness(run.measures[-1]):.2f}" if run.measures else "-"
            table.add_row(run.variant.name, str(run.steps_done), loss, ratio)
        return table


def exactness(measure: Measure) -> float:
    """Mean of the stored exp_avg_sq relative to the same average of the run's own gradients kept in fp32."""
    return measure.second_moment / measure.exact_second_moment


def curve_table(runs: Sequence[Run], rows: int = 10) -> Table:
    """Validation losses of all runs at about ``rows`` of the measured steps, the last one included."""
    table = Table(title="Validation loss, nats per byte", title_justify="left", box=None, padding=(0, 2))
    table.add_column("step", justify="right")
    for run in runs:
        table.add_column(run.variant.name, justify="right")
    count = len(runs[0].measures)
    for i in sorted({count - 1 - (count * k) // rows for k in range(rows)}):
        losses = [f"{run.measures[i].validation_loss:.4f}" for run in runs]
        table.add_row(str(runs[0].measures[i].step), *losses)
    return table


def final_table(runs: Sequence[Run]) -> Table:
    """What each run ended with and what it stored."""
    table = Table(title="Result", title_justify="left", box=None, padding=(0, 2))
    table.add_column("")
    for column in (
        "validation\nloss",
        "minus\nfp32's",
        "bytes per\nparameter",
        "updates lost\nby nearest",
        "exp_avg_sq\n/ fp32's",
        "exp_avg_sq\n/ exact",
    ):
        table.add_column(column, justify="right")
    reference = runs[0].measures[-1]
    for run in runs:
        last = run.measures[-1]
        lost = sum(m.lost_share for m in run.measures) / len(run.measures)
        table.add_row(
            run.variant.name,
            f"{last.validation_loss:.4f}",
            f"{last.validation_loss - reference.validation_loss:+.4f}" if run is not runs[0] else "",
            f"{run.bytes_per_parameter():.1f}",
            f"{lost:.0%}",
            f"{last.second_moment / reference.second_moment:.2f}",
            f"{exactness(last):.2f}",
        )
    return table


def save_picture(runs: Sequence[Run], subtitle: str, path: Path) -> None:
    """Writes a PNG of three curves by step: validation loss, its difference to fp32's, and exp_avg_sq / exact."""
    figure = Figure(figsize=(12.6, 4.6), dpi=130, layout="constrained")
    figure.suptitle(f"AdamW in bf16, stored in four ways\n{subtitle}", fontsize=11)
    losses, gaps, moments = figure.subplots(1, 3)
    reference = runs[0]
    steps = [m.step for m in reference.measures]
    base = [m.validation_loss for m in reference.measures]
    for i, run in enumerate(runs):
        mine = [m.validation_loss for m in run.measures]
        _line(losses, steps, mine, i, run)
        _line(gaps, steps, [a - b for a, b in zip(mine, base, strict=True)], i, run)
        _line(moments, steps, [exactness(m) for m in run.measures], i, run)
    _dress(losses, "Validation loss (nats per byte)")
    losses.legend(frameon=False)
    _dress(gaps, "Validation loss minus fp32's")
    _dress(moments, "Mean of exp_avg_sq relative to the exact one")
    figure.savefig(path, format="png")


def _line(axes: Axes, steps: list[int], values: list[float], i: int, run: Run) -> None:
    axes.plot(steps, values, color=COLOURS[i], linestyle=STYLES[i], linewidth=WIDTHS[i], label=run.variant.name)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
