"""Results as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from subulp.lab.bench.measure import STREAM, YARDSTICK, Result
from subulp.lab.bench.workloads import Workload

Results = Sequence[tuple[Workload, Sequence[Result]]]

HEADINGS = (
    "implementation",
    "median ms",
    "min ms",
    "GB/s",
    "/ stream",
    "/ torch fused",
    "peak extra MiB",
    "what it is",
)


def as_markdown(workload: Workload, results: Sequence[Result]) -> str:
    """A table of one workload, aligned for a terminal."""
    rows = [HEADINGS, *(_row(workload, result) for result in results)]
    widths = [max(len(row[c]) for row in rows) for c in range(len(HEADINGS))]
    right = range(1, len(HEADINGS) - 1)
    lines = [
        "| "
        + " | ".join(
            f"{v:>{w}}" if c in right else f"{v:<{w}}" for c, (v, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if c in right else "-") for c, w in enumerate(widths)) + "|"
    return "\n".join(
        [f"{workload.name}: {workload.description}, {workload.elements:,} parameters", "", lines[0], rule, *lines[1:]]
    )


def _row(workload: Workload, result: Result) -> tuple[str, ...]:
    name = f"{result.name} {result.version}".strip()
    if result.refusal is not None:
        return (name, *("-",) * (len(HEADINGS) - 2), result.refusal)
    what = result.description
    if isinstance(result.peak_extra, str):
        what += f" (memory: {result.peak_extra})"
    return (
        name,
        _milliseconds(result.median),
        _milliseconds(min(result.samples)),
        f"{result.gigabytes_per_second(workload.elements):.1f}" if workload.elements > 1 else "",
        _ratio(result.relative_to_stream),
        _ratio(result.relative),
        f"{result.peak_extra / 2**20:.1f}" if isinstance(result.peak_extra, int) else "",
        what,
    )


def _milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else ""


def write_csv(path: Path, machine: Mapping[str, str], results: Results) -> None:
    """One row for each implementation and workload, with everything needed to compare it with another machine's."""
    rows = [
        {
            **machine,
            "workload": workload.name,
            "tensors": len(workload.shapes),
            "parameters": workload.elements,
            "implementation": result.name,
            "version": result.version,
            "rounds": len(result.samples),
            "median_ms": "" if result.refusal else f"{result.median:.6f}",
            "min_ms": "" if result.refusal else f"{min(result.samples):.6f}",
            "bytes": workload.elements * result.bytes_per_parameter,
            "gb_per_s": "" if result.refusal else f"{result.gigabytes_per_second(workload.elements):.3f}",
            "share_of_stream": _share(result),
            "ratio_to_torch_fused": f"{median(result.relative):.4f}" if result.relative else "",
            "peak_extra_bytes": result.peak_extra if isinstance(result.peak_extra, int) else "",
            "note": result.refusal or (result.peak_extra if isinstance(result.peak_extra, str) else ""),
        }
        for workload, rows in results
        for result in rows
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _share(result: Result) -> str:
    """The stream's time as a part of this one's."""
    return f"{1 / median(result.relative_to_stream):.4f}" if result.relative_to_stream else ""


def save_picture(path: Path, machine: Mapping[str, str], results: Results) -> None:
    """Bars of the median times, a panel for each workload, on a logarithmic scale. Needs matplotlib."""
    from matplotlib.figure import Figure

    columns = min(len(results), 3)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), dpi=130, layout="constrained")
    figure.suptitle(
        f"One AdamW step, bf16: {machine['cpu']}, {machine['threads']} threads, {machine['date']}", fontsize=10
    )
    for n, (workload, measured) in enumerate(results):
        axes = figure.add_subplot(rows, columns, n + 1)
        shown = sorted((r for r in measured if r.refusal is None), key=lambda r: r.median, reverse=True)
        colours = [
            "#d1495b" if r.name.startswith("subulp") else "#222222" if r.name in (YARDSTICK, STREAM) else "#9aa5b1"
            for r in shown
        ]
        bars = axes.barh([r.name for r in shown], [r.median for r in shown], color=colours)
        axes.bar_label(bars, [_milliseconds(r.median) for r in shown], padding=3, fontsize=7)
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.set_title(workload.description, fontsize=8, loc="left")
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
