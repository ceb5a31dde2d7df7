"""The machine code of the Triton kernel for GPUs that are not here: see triton_aot.py, which compiles it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

NVIDIA = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
TARGETS = [*NVIDIA, "gfx942"]
CASES = ["adamw", "adamw_nearest", "adamw_fp32_states", "adamw_fp16", "amsgrad", "lerp"]
LIMIT = {"adamw": 80, "adamw_nearest": 66, "adamw_fp32_states": 62, "adamw_fp16": 116, "amsgrad": 98, "lerp": 20}
"""Instructions per element: what docs/gpu/README.md records, and a few for other compiler versions."""


@pytest.fixture(scope="module")
def report() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.backends.triton_aot"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_no_spills_and_128_bit_accesses(report: Any, target: str, case: str) -> None:
    code = report["code"][target][case]
    assert code["spilled"] == 0
    # Eight elements a thread: one access for a 16-bit tensor, two for an fp32 one.
    loads = {"adamw_fp32_states": 6, "amsgrad": 5, "lerp": 3}.get(case, 4)
    stores = {"adamw_fp32_states": 5, "amsgrad": 4, "lerp": 1}.get(case, 3)
    assert (code["loads_128"], code["stores_128"]) == (loads, stores)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_for_matrices_compile_without_contraction(report: Any, target: str) -> None:
    found = report["matrices"][target]
    assert found == dict.fromkeys(("sum_pieces", "sum_strips", "fold_pieces", "fold_strips", "update_factored"), 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia_arithmetic_is_rounded_and_not_contracted(report: Any, target: str, case: str) -> None:
    code = report["code"][target][case]
    assert (code["fma_ptx"], code["unrounded_ptx"], code["approximate_ptx"]) == (0, 0, 0)
    # Eight elements in the vector part, two in the other.
    assert code["div_rn"] == code["sqrt_rn"] == (0 if case == "lerp" else 10)


@pytest.mark.parametrize("case", CASES)
def test_amd_arithmetic_is_rounded_and_not_contracted(report: Any, case: str) -> None:
    code = report["code"]["gfx942"][case]
    assert code["contract_llir"] == 0
    assert code["denormals"] == 3  # neither inputs nor results are flushed
    assert code["div_rn"] == code["sqrt_rn"] == (0 if case == "lerp" else 10)
    # LLVM's expansion of a correctly rounded division has five fused multiply-adds, that of a square root two. Each of the
    # two fp16 stores converts to a 64-bit integer, which has one.
    assert code["fma_machine"] == (7 + 2 * (case == "adamw_fp16")) * code["div_rn"]


@pytest.mark.parametrize("target", TARGETS)
def test_sums_of_products_have_no_fused_multiply_add(report: Any, target: str) -> None:
    assert report["code"][target]["lerp"]["fma_machine"] == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_that_check_sees_contraction_where_it_is_allowed(report: Any, target: str) -> None:
    assert report["fused"][target]["fma_machine"] > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", NVIDIA)
def test_instructions_per_element(report: Any, target: str, case: str) -> None:
    assert 0 < report["code"][target][case]["per_element"] <= LIMIT[case]


def test_changing_hyperparameters_compile_nothing(report: Any) -> None:
    assert report["launch"] == {"launches": 20, "kernels": 1}
