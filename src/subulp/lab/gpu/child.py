"""A task in a process of its own: ``python -m subulp.lab.gpu.child [--dry-run] first-step | time PEER``.

A timing has the device's memory to itself so, and a peer that crashes or compiles for minutes ends alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from subulp.lab.gpu.setting import CPU, Setting

DRY_RUN = "--dry-run"


def setting_of(rehearsal: bool) -> Setting:
    """Of this machine."""
    return Setting(CPU if rehearsal else torch.device("cuda"), rehearsal=rehearsal)


def call(setting: Setting, *arguments: str, timeout: float) -> Any:
    """Runs a task in a new process and returns its result.

    Raises:
        RuntimeError: it failed; the message is the last line that it wrote to stderr.
        subprocess.TimeoutExpired: it took longer and was killed.
    """
    command = [sys.executable, "-m", __name__, *[DRY_RUN] * setting.rehearsal, *arguments]
    # Triton reads its variable when it is imported.
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if setting.rehearsal else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Prints the result as JSON, last."""
    from subulp.lab.gpu import fresh, timing

    setting = setting_of(DRY_RUN in arguments)
    task, *rest = (argument for argument in arguments if argument != DRY_RUN)
    tasks: dict[str, Any] = {
        "first-step": lambda: fresh.first_step(setting.device, setting.backend),
        "time": lambda peer: timing.time_peer(setting, peer),
    }
    print(json.dumps(tasks[task](*rest)))


if __name__ == "__main__":
    main(sys.argv[1:])
