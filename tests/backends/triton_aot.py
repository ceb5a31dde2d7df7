"""Compiles the Triton kernel for GPUs that are not here, and counts what is in the machine code.

A program of its own, since Triton's interpreter (test_triton.py) and its compiler exclude each other in one process::

    python -m tests.backends.triton_aot            # one JSON object on standard output
    python -m tests.backends.triton_aot --table    # the tables of docs/gpu/README.md
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from subulp.backends.bucket import Bucket
from subulp.backends.triton import kernel as triton_kernel
from subulp.backends.triton import launch as triton_gpu
from subulp.backends.triton import matrix_kernel
from subulp.backends.triton.bindings import jitted
from subulp.formula.compose import quantity
from subulp.formula.factors import weighed
from subulp.formula.rule import Rule
from subulp.rounding import LERP
from subulp.rules.adamw import AMSGRAD, PLAIN
from subulp.rules.came import MATRIX
from subulp.rules.factored import square
from subulp.storage import CODECS
from subulp.storage.element import value_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

CASES: dict[str, tuple[Rule, tuple[str, ...], bool]] = {
    "adamw": (PLAIN, ("bf16",) * 4, True),
    "adamw_nearest": (PLAIN, ("bf16",) * 4, False),
    "adamw_fp32_states": (PLAIN, ("bf16", "fp32", "fp32", "bf16"), True),
    "adamw_fp16": (PLAIN, ("fp16", "fp16", "bf16", "fp16"), True),
    "amsgrad": (AMSGRAD, ("bf16",) * 5, True),
    "lerp": (LERP, ("bf16", "fp32"), True),
}
"""``lerp`` is products and sums alone: any fused multiply-add in it is a contraction."""

ELEMENTS_PER_THREAD = 2 * triton_kernel.PAIRS // triton_kernel.THREADS

_POINTERS = {"table": "*i64", "chunks": "*i64", "steps": "*i64", "scalar_table": "*fp32"}
_POINTERS |= {"found_inf": "*i64", "grad_scale": "*i64", "read_factor": "fp32"}
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_PIPES = (
    ("FMA", r"FMUL|FADD|FFMA|IMAD|FSWZADD"),
    ("XU", r"MUFU|FCHK|I2F|F2I|F2F"),
    ("memory", r"LDG|STG|LDC"),
    ("control", r"BRA|BSSY|BSYNC|EXIT|CALL|RET|NOP"),
    ("uniform", r"U[A-Z]|R2UR"),
)
"""Where NVIDIA's schedulers send an instruction; the rest goes to the integer pipe."""


def compile_for(target: str, case: str, **options: Any) -> Any:
    """The compiled kernel: ``asm`` has every stage of it. ``options`` override the compiler options of the backend."""
    rule, formats, stochastic = CASES[case]
    codecs = {codec.name: codec for codec in CODECS.values()}
    constants = triton_kernel.constants(rule, tuple(codecs[name] for name in formats), 1, stochastic)
    signature = {**_POINTERS, **dict.fromkeys(constants, "constexpr")}
    gpu = TARGETS[target]
    source = ASTSource(triton_kernel.update, signature, constants)
    return triton.compile(source, target=gpu, options={**triton_kernel.options(gpu.warp_size), **options})


def analyse(target: str, case: str, **options: Any) -> dict[str, Any]:
    """Counts of what matters in the machine code."""
    asm = compile_for(target, case, **options).asm
    return _amd(asm) if TARGETS[target].backend == "hip" else _nvidia(asm)


def _nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    ptx = asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        sass = _tool("nvdisasm", "-c", cubin)
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    opcodes = Counter(op for op, _ in _instructions(sass))
    loop = _hot_loop(sass)
    pipes = Counter(next((name for name, ops in _PIPES if re.match(ops, op)), "integer") for op in loop)
    return {
        "registers": registers,
        "spilled": stack + local,
        "fma_ptx": len(re.findall(r"\bfma\.|\bmad\.\S*f32", ptx)),
        "unrounded_ptx": len(re.findall(r"\b(?:add|sub|mul)\.(?!rn\.)\S*f32", ptx)),
        "approximate_ptx": len(re.findall(r"\.approx|div\.full|\.ftz", ptx)),
        "div_rn": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "sqrt_rn": len(re.findall(r"\bsqrt\.rn\.f32", ptx)),
        "fma_machine": sum(n for op, n in opcodes.items() if op.startswith("FFMA")),
        "loads_128": opcodes["LDG.E.128"],
        "stores_128": opcodes["STG.E.128"],
        "per_element": round(len(loop) / ELEMENTS_PER_THREAD, 1),
        "pipes": {name: round(n / ELEMENTS_PER_THREAD, 1) for name, n in sorted(pipes.items())},
    }


def _tool(name: str, *arguments: Any) -> str:
    return subprocess.run([str(_BIN / name), *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def _instructions(sass: str) -> list[tuple[str, str]]:
    """(opcode, operands) of every instruction, and ("label", name) of every label."""
    result = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            result.append(("label", label[1]))
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            result.append((code[1], code[2]))
    return result


def _hot_loop(sass: str) -> list[str]:
    """The opcodes that one pass of the vector loop executes when no division or root needs its slow path."""
    code = _instructions(sass)
    stores = [i for i, (op, _) in enumerate(code) if op == "STG.E.128"]
    if not stores:
        return []
    where = {name: i for i, (op, name) in enumerate(code) if op == "label"}
    target = {
        i: where[m[1]] for i, (op, at) in enumerate(code) if op[:3] == "BRA" and (m := re.search(r"(\.L_x_\d+)", at))
    }
    begin, end = next((to, i) for i, to in target.items() if i > stores[-1] and to < stores[0])
    executed = []
    i = begin
    while i <= end:
        op = code[i][0]
        if op != "label":
            executed.append(op)
        # A forward branch over a call: the call is the slow path.
        skips = i < target.get(i, 0) <= end and any(o.startswith("CALL") for o, _ in code[i : target[i]])
        i = target[i] if skips else i + 1
    return executed


def _amd(asm: dict[str, Any]) -> dict[str, Any]:
    text = asm["amdgcn"]
    opcodes = Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE))

    def count(pattern: str) -> int:
        return sum(n for op, n in opcodes.items() if re.fullmatch(pattern, op))

    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),  # type: ignore[index]
        "spilled": sum(map(int, re.findall(r"\.(?:v|s)gpr_spill_count:\s+(\d+)", text))),
        "denormals": int(re.search(r"amdhsa_float_denorm_mode_32 (\d)", text)[1]),  # type: ignore[index]
        "contract_llir": len(
            re.findall(r"\bf(?:add|sub|mul|div)\b.*\b(?:fast|contract|afn|arcp|reassoc)\b", asm["llir"])
        ),
        "fma_machine": count(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f32\w*"),
        "div_rn": count("v_div_fixup_f32"),
        "sqrt_rn": count(r"v_sqrt_f32\w*"),
        "loads_128": count("global_load_dwordx4"),
        "stores_128": count("global_store_dwordx4"),
    }


def matrix_kernels(target: str) -> dict[str, int]:
    """Contracted multiply-adds in each kernel for stacks of matrices: of CAME's update and the sum of its squares."""
    gpu, bf16, fp32 = TARGETS[target], CODECS[torch.bfloat16], CODECS[torch.float32]
    specialised = {
        "VALUE": jitted(value_of(quantity(weighed, square), (bf16, fp32), False)),
        "SIZES": 2,
        "SCALED": False,
    }
    specialised |= {"COLUMNS": 1, "BY_COL": 1, "BY_ROW": 1, "SCALARS": 0}
    factors = triton_kernel.constants(MATRIX.by_rows(), (bf16, bf16, bf16, fp32, fp32), 1, True)
    update = {
        name: factors[name] for name in ("UPDATE", "ENCODE", "SIZES", "DRAWS", "WORDS", "WRITTEN", "DIMS", "SCALED")
    }
    update |= {"COLUMNS": 3, "BY_COL": 2, "BY_ROW": 2, "SCALARS": len(MATRIX.scalars), "TILE": factors["SINGLES"]}
    tables = {"table": "*i64", "chunks": "*i64", "scalar_table": "*fp32", "sums": "*fp64", "factor": "fp32"}
    fold = {"sums": "*fp64", "folded": "*fp64", "chunks": "*i64"}
    steps = {"table": "*i64", "chunks": "*i64", "steps": "*i64", "scalar_table": "*fp32", "factor": "fp32"}
    kernels: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
        "sum_pieces": (matrix_kernel.sum_pieces, tables, {**specialised, "ROWS": matrix_kernel.ROWS}),
        "sum_strips": (matrix_kernel.sum_strips, tables, {**specialised, "COLS": matrix_kernel.COLS}),
        "fold_pieces": (matrix_kernel.fold_pieces, fold, {}),
        "fold_strips": (matrix_kernel.fold_strips, fold, {"COLS": matrix_kernel.COLS}),
        "update_factored": (matrix_kernel.update_factored, steps, update),
    }
    found = {}
    for name, (kernel, signature, constants) in kernels.items():
        source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
        asm = triton.compile(source, target=gpu, options=triton_kernel.options(gpu.warp_size)).asm
        text = asm.get("ptx") or asm["amdgcn"]
        # Division expands to fused operations of its own on AMD: what counts there is the flags in the IR.
        flags = re.findall(r"\bf(?:add|sub|mul)\b.*\bcontract\b", asm["llir"])
        found[name] = len(re.findall(r"\bfma\.\S*f(?:32|64)", text)) + len(flags)
    return found


def launches() -> dict[str, int]:
    """How many kernels the launch code compiles over steps in which learning rate, step and sizes change.

    The launcher runs up to the launch itself, with a driver that claims to be an H200.
    """
    fake = SimpleNamespace(
        get_current_target=lambda: TARGETS["sm_90"],
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(fake)
    run = JITFunction.run
    compiled = []

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(id(kernel))
        return kernel

    with mock.patch.object(JITFunction, "run", warm_up):
        for step in range(1, 21):
            tensors = [[torch.ones(n, dtype=torch.bfloat16)] for n in (16, 16, 16, 16)]
            bucket = Bucket(
                tensors[:3],
                tensors[3:],
                [None],
                [step << 40],
                np.array([step]),
                np.array([[0.01 / step, 0.1, 0.999, 0.001, 1e-8, 0.001, float(step)]]),
                np.zeros(1, dtype=np.int64),
            )
            triton_gpu.run(PLAIN, bucket, seed=step * 2**59, stochastic=True)
    return {"launches": len(compiled), "kernels": len(set(compiled))}


def _table() -> None:
    for case in CASES:
        print(f"\n{case}\n")
        for target in TARGETS:
            print(f"{target}: {analyse(target, case)}")


if __name__ == "__main__":
    if "--table" in sys.argv:
        _table()
    else:
        result: dict[str, Any] = {target: {case: analyse(target, case) for case in CASES} for target in TARGETS}
        matrices = {target: matrix_kernels(target) for target in TARGETS}
        fused = {target: analyse(target, "lerp", enable_fp_fusion=True) for target in ("sm_90", "gfx942")}
        print(json.dumps({"code": result, "fused": fused, "launch": launches(), "matrices": matrices}))
