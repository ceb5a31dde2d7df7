"""Peak extra memory of a step: a process of its own, and the operating system's count of its resident pages.

torch's profiler sees torch's allocator only, not what Numba or numpy allocate; the resident set sees everything. In a
fresh process, after warm-up: the allocator returns its free pages (``malloc_trim``), the kernel resets its high-water mark
(``/proc/self/clear_refs``), one step runs, and the high-water mark minus the resident set before it is the extra memory.
glibc is told to map every block of 64 KiB or more separately (``MALLOC_MMAP_THRESHOLD_``), so that no freed block of an
earlier step serves a later one unseen. Parameters, gradients and state exist before. The median of five steps; the
kernel's counters are exact to about 0.1 MiB a core. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from subulp.lab.bench.candidate import Candidate, renew_gradients
from subulp.lab.bench.peers import IMPLEMENTATIONS
from subulp.lab.bench.workloads import WORKLOADS, make_data

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SECONDS = 900


def peak_extra_bytes(implementation: str, workload: str, threads: int, seed: int) -> int | str:
    """Runs the measurement in a new process; a string says why there is none."""
    if not _RESET.exists():
        return "needs Linux"
    command = [sys.executable, "-m", __name__, implementation, workload, str(threads), str(seed)]
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
        "MALLOC_TOP_PAD_": "0",
        "OMP_NUM_THREADS": str(threads),
    }
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no result after {_SECONDS} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return f"failed: {lines[-1] if lines else f'exit status {done.returncode}'}"
    return int(done.stdout.split()[-1])


def peak_extra(action: Callable[[], object]) -> int:
    """By how many bytes the resident set of this process exceeds its present size while ``action`` runs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    _RESET.write_text(_RESET_PEAK)
    before = _status("VmRSS")
    action()
    return max(_status("VmHWM") - before, 0)


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _main(implementation: str, workload: str, threads: int, seed: int) -> None:
    torch.set_num_threads(threads)
    chosen = WORKLOADS[workload]
    data = make_data(chosen.shapes, seed, chosen.one_group_each)
    candidate = Candidate(IMPLEMENTATIONS[implementation], data)
    peaks = []
    for step in range(3 + 5):
        renew_gradients(candidate.params, data.gradients, candidate.gradients)
        peak = peak_extra(candidate.optimizer.step)
        if step >= 3:
            peaks.append(peak)
    print(int(median(peaks)))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
