"""Tell what this installation runs on, which backend serves which tensors and why, and whether the backends agree.

The self test makes one AdamW step on every backend that serves CPU tensors, and compares the stored bits with the
reference backend's. Exit status: 0 all equal, 1 a backend differs or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from importlib import metadata
from typing import Any

import torch

import subulp
from subulp.backends import registry
from subulp.lab.self_test import Outcome, self_test

COMBINATIONS = {
    "bf16 throughout": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16, fp32 gradients": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16, fp32 states": (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16),
    "fp16, bf16 squares": (torch.float16, torch.float16, torch.bfloat16, torch.float16),
    "fp32 throughout": (torch.float32, torch.float32, torch.float32, torch.float32),
}
"""Usual dtypes of (parameter, exp_avg, exp_avg_sq, gradient)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--json", action="store_true", help="print the same report as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if the self test failed."""
    report = make_report()
    print(json.dumps(report, indent=2) if args.json else "\n".join(as_text(report)))
    return 0 if all(outcome["ok"] for outcome in report["self_test"]) else 1


def make_report() -> dict[str, Any]:
    """Everything that the command prints, as plain values."""
    with warnings.catch_warnings():
        # The registry warns of a missing fast backend; the report says it in its own place.
        warnings.simplefilter("ignore", UserWarning)
        devices = _devices()
        backends = _backends([device["type"] for device in devices])
        outcomes = self_test()
    return {
        "versions": _versions(),
        "platform": _platform(),
        "threads": _threads(),
        "devices": devices,
        "backends": backends,
        "cures": _cures(backends, outcomes),
        "self_test": [outcome.as_dict() for outcome in outcomes],
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"subulp": subulp.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "numba", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _platform() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "usable_cores": usable,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def _threads() -> dict[str, Any]:
    return {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _devices() -> list[dict[str, Any]]:
    """The CPU and the accelerators that torch can use."""
    devices: list[dict[str, Any]] = [{"type": "cpu", "name": "cpu", "description": _cpu_name()}]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return devices
    module = torch.get_device_module(accelerator)
    describe = getattr(module, "get_device_name", None)
    for i in range(torch.accelerator.device_count()):
        name = f"{accelerator.type}:{i}"
        devices.append({"type": accelerator.type, "name": name, "description": describe(i) if describe else name})
    return devices


def _backends(device_types: list[str]) -> list[dict[str, str]]:
    rows = []
    for device in dict.fromkeys(device_types):
        for title, dtypes in COMBINATIONS.items():
            backend, reason = registry.explain("auto", torch.device(device), dtypes)
            rows.append({"device": device, "dtypes": title, "backend": backend, "reason": reason})
    return rows


def _cures(backends: list[dict[str, str]], outcomes: list[Outcome]) -> list[str]:
    cures = []
    if any(registry.INSTALL_NUMBA in row["reason"] for row in backends):
        cures.append(f"CPU tensors use the slow reference backend, with the same bits: {registry.INSTALL_NUMBA}")
    if any(registry.INSTALL_TRITON in row["reason"] for row in backends):
        cures.append(f"GPU tensors use the slow reference backend, with the same bits: {registry.INSTALL_TRITON}")
    for outcome in outcomes:
        if outcome.error is not None:
            cures.append(
                f"The {outcome.backend} backend fails ({outcome.error}). Until it is repaired, pass backend='eager': "
                "slower, same bits."
            )
        elif not outcome.same_bits:
            cures.append(
                f"The {outcome.backend} backend gives other bits than the reference. Pass backend='eager', and please "
                "report it with the output of `subulp doctor --json`."
            )
    return cures


def as_text(report: dict[str, Any]) -> list[str]:
    """The report as lines for a terminal."""
    lines = _section("Versions", [(name, version or "not installed") for name, version in report["versions"].items()])
    lines += _section("Platform", [(key.replace("_", " "), str(value)) for key, value in report["platform"].items()])
    lines += _section(
        "Threads", [(key, str(value) if value is not None else "not set") for key, value in report["threads"].items()]
    )
    lines += _section("Devices that torch sees", [(d["name"], d["description"]) for d in report["devices"]])
    lines += _section(
        "Backend chosen (backend='auto')",
        [(f"{row['device']}, {row['dtypes']}", f"{row['backend']}: {row['reason']}") for row in report["backends"]],
    )
    lines += _section(
        "Self test: one AdamW step on CPU tensors, compared with the eager backend",
        [(f"{o['backend']}, {o['dtypes']}", _verdict(o)) for o in report["self_test"]],
    )
    lines += ["Cures"] + [f"  {cure}" for cure in report["cures"]] if report["cures"] else ["Nothing to cure."]
    return lines


def _verdict(outcome: dict[str, Any]) -> str:
    if outcome["error"] is not None:
        return f"failed: {outcome['error']}"
    return f"same bits: {'yes' if outcome['ok'] else 'NO'} ({outcome['seconds']:.2f} s)"


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(key) for key, _ in rows), default=0)
    return [title, *(f"  {key:<{width}}  {value}" for key, value in rows), ""]
