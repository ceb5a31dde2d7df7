"""Checks subulp on a GPU and measures it: bits, capture, synchronisation, speed. Takes at most four minutes.

    python scripts/gpu_check.py                  # everything
    python scripts/gpu_check.py bits capture     # some sections
    python scripts/gpu_check.py --dry-run        # its own logic, in Triton's interpreter on a CPU, in small

Prints a line for every check and, last, "N passed, N failed". Goals of speed count as checks. What does not fit (memory,
time, a library that is not installed) is named as skipped and not counted. The checks are in subulp.lab.gpu.
"""

# ruff: noqa: E402  The time counts from here, and Triton reads its variable when it is imported

import time

STARTED = time.monotonic()

import os
import sys

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

from subulp.lab.gpu.main import main

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", started=STARTED))
