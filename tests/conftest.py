"""Common to all tests.

Uninitialised memory is NaN, so that a value which was never written cannot pass. A test begins as a process does: the count
of optimizers without names, by which their noise goes, starts at 0 whichever tests ran before.
"""

import pytest
import torch

from subulp.numerics import streams


@pytest.fixture(autouse=True)
def _poisoned_memory():
    # With deterministic algorithms torch fills torch.empty with NaN (torch.utils.deterministic).
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _first_of_the_process():
    streams._made.clear()
