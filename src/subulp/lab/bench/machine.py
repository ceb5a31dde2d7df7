"""What the figures of a benchmark depend on."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib import metadata

import torch

import subulp


def describe_machine(threads: int, seed: int) -> dict[str, str]:
    """The columns that every row of a result file starts with."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(threads),
        "load": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "",
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "numba": _version("numba"),
        "subulp": subulp.__version__,
        "seed": str(seed),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    """Family, model and stepping too: virtual machines often hide the name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in file if ":" in line]
    except OSError:
        return platform.processor() or "unknown"
    found = {pair[0]: pair[1] for pair in reversed(pairs)}
    values = [found[key] for key in wanted if key in found]
    name, *numbers = values or [platform.processor() or "unknown"]
    return f"{name} (family/model/stepping {'/'.join(numbers)})" if numbers else name
