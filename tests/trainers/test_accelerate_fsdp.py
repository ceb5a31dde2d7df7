"""Accelerate with FSDP2, the real package, in two gloo processes; the program is accelerate_fsdp_worker.py."""

from __future__ import annotations

import pytest
import torch

from tests.bits import same_bits
from tests.trainers.ranks import run_in_two_processes

pytest.importorskip("accelerate", reason="pip install transformers accelerate")
pytest.importorskip("transformers", reason="pip install transformers accelerate")

pytestmark = pytest.mark.slow

WORKER = "tests.trainers.accelerate_fsdp_worker"


def test_fsdp2_trains_saves_and_resumes_bit_for_bit(tmp_path):
    run_in_two_processes(WORKER, str(tmp_path))
    run_in_two_processes(WORKER, str(tmp_path), "resume")
    for rank in range(2):
        whole, resumed = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("whole", "resumed"))
        assert whole["sharded"]
        assert whole["losses"][-1] < 0.8 * whole["losses"][0]
        assert whole["losses"][-len(resumed["losses"]) :] == resumed["losses"]
        assert whole["steps"] == resumed["steps"] == {len(whole["losses"])}
        assert {t.dtype for t in whole["tensors"]} == {torch.bfloat16}
        assert all(map(same_bits, whole["tensors"], resumed["tensors"]))
