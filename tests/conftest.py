"""Common to all tests: uninitialised memory is NaN, so that a value which was never written cannot pass."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    # With deterministic algorithms torch fills torch.empty with NaN (torch.utils.deterministic).
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
