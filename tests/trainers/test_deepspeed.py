"""DeepSpeed ZeRO, the real package, in two gloo processes on the CPU; the program is deepspeed_worker.py."""

from __future__ import annotations

import importlib.util
import math
import shutil

import pytest
import torch

from tests.bits import same_bits
from tests.trainers.ranks import run_in_two_processes

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: .ci/run shows how", allow_module_level=True)
if shutil.which("c++") is None:
    pytest.skip("DeepSpeed compiles its collectives at first use and needs c++", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "master"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")])
def test_zero_trains_resumes_and_keeps_replicas_equal(stage, master, tmp_path):
    run_in_two_processes("tests.trainers.deepspeed_worker", str(stage), master, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for seen in (first, second):
        losses = seen["losses"]
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        # ZeRO 1 and 2 step one group at a time; a counter of the optimizer's own would count each. Without ZeRO,
        # DeepSpeed makes the states of any optimizer by one step at its full lr (initialize_optimizer_states).
        assert seen["steps"] == [len(losses) + (stage == 0)] * len(seen["steps"])
        dtype = torch.bfloat16 if master == "bf16" else torch.float32
        assert {p.dtype for p in seen["masters"]} == set(seen["dtypes"]) == {dtype}
        assert all(map(same_bits, seen["masters"], seen["resumed"]))
    assert all(map(same_bits, first["weights"], second["weights"]))
    if first["small"] is not None:
        assert same_bits(first["small"], second["small"])
        # 50 moves of 1e-4 where the gap is 2**-8, each rounded with the variance f (1 - f) gap**2, over 4096 weights,
        # of which two pieces of one half share their draws: 5 standard errors of 2048 independent ones.
        gap, f = 2.0**-8, 1e-4 * 2**8
        error = 5 * math.sqrt(50 * f * (1 - f) / 2048) * gap if master == "bf16" else 2.0**-9
        assert float(first["small"].mean()) == pytest.approx(1 - 50 * 1e-4, abs=error)
