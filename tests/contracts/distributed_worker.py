"""Runs the distributed checks in groups of gloo processes on this machine; each check's outcome goes to a file.

``python -m tests.contracts.distributed_worker DIRECTORY [smoke]``. The program imports torch once and forks every process
from there, since importing takes seconds and there are many processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import subulp
from tests.specs import SPECS, Spec

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
GROUP_TIMEOUT = 1200.0


@dataclass(frozen=True)
class World:
    """One process among ``size``."""

    rank: int
    size: int
    directory: Path

    @property
    def mesh(self) -> DeviceMesh:
        """All processes in a row."""
        return init_device_mesh("cpu", (self.size,))


@dataclass(frozen=True)
class Check:
    function: Callable[[World, Spec], None]
    sizes: tuple[int, ...]
    late: bool
    smoke: bool

    @property
    def name(self) -> str:
        return self.function.__name__


CHECKS: list[Check] = []

SMOKE = [SPECS[0], next(spec for spec in SPECS if spec.cls is subulp.CAME)]
"""An elementwise optimizer, and one that sums over parameters and keeps averages of both dimensions."""


def check(
    *sizes: int, late: bool = False, smoke: bool = False
) -> Callable[[Callable[[World, Spec], None]], Callable[[World, Spec], None]]:
    """Registers a check for groups of these sizes.

    ``late`` ones run after all groups have run all others. ``smoke`` ones also run in the fast suite, in two processes
    and with the optimizers of :data:`SMOKE`.
    """

    def register(function: Callable[[World, Spec], None]) -> Callable[[World, Spec], None]:
        CHECKS.append(Check(function, sizes, late, smoke))
        return function

    return register


def cases(smoke: bool = False) -> Iterator[tuple[Check, int, Spec]]:
    """Every (check, size of its group, optimizer), in the order of running."""
    from tests.contracts import (  # noqa: F401
        distributed_checkpoints,
        distributed_fsdp,
        distributed_replicas,
        distributed_tensors,
    )

    for late in (False, True):
        for size in sorted({size for entry in CHECKS for size in entry.sizes}):
            for entry in CHECKS:
                if entry.late == late and size in entry.sizes and (not smoke or (entry.smoke and size == 2)):
                    for spec in SMOKE if smoke else SPECS:
                        yield entry, size, spec


def key(entry: Check, size: int, spec: Spec) -> str:
    """What an outcome is filed under."""
    return f"{entry.name}-{size}-{spec}"


def outcomes(directory: Path, name: str, size: int) -> list[str]:
    """What each process of the group says of the check: "" is success."""
    said = []
    for rank in range(size):
        file = directory / f"{name}.{rank}"
        said.append(json.loads(file.read_text()) if file.exists() else f"process {rank} never finished this check")
    return said


def _run_process(rank: int, size: int, directory: Path, number: int, work: list[tuple[Check, int, Spec]]) -> None:
    torch.set_num_threads(1)
    # Fills fresh memory with NaN, as tests/conftest.py does for the other tests.
    torch.use_deterministic_algorithms(True)
    store = f"file://{directory / f'store{number}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    for entry, _, spec in work:
        try:
            entry.function(World(rank, size, directory), spec)
            said = ""
        except Exception:
            said = f"process {rank}: {traceback.format_exc()}"
        (directory / f"{key(entry, size, spec)}.{rank}").write_text(json.dumps(said))
        dist.barrier()
    dist.destroy_process_group()


def main(directory: Path, smoke: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    batches: dict[tuple[bool, int], list[tuple[Check, int, Spec]]] = {}
    for case in cases(smoke):
        batches.setdefault((case[0].late, case[1]), []).append(case)
    for number, ((_, size), work) in enumerate(batches.items()):
        processes = [
            context.Process(target=_run_process, args=(rank, size, directory, number, work)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(GROUP_TIMEOUT)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    # Imported by its name, since the checks register themselves there and not in __main__.
    from tests.contracts.distributed_worker import main as run

    run(Path(sys.argv[1]), "smoke" in sys.argv[2:])
