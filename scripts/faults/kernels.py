"""Faults in the Numba and Triton twins of the arithmetic, in their tables and in the native sums."""

from __future__ import annotations

from faults import faults

_NUMBA = "backends/test_numba.py"
_TRITON = "backends/test_triton.py"

MUTANTS = [
    *faults(
        "backends/numba/body.py",
        f"backends/test_plans.py {_NUMBA}",
        ("numba-counter-stands", "counter = u32(counter + u32(1))", "counter = u32(counter + u32(0))"),
        ("numba-odd-start", "if index & i64(1) and count > 0:", "if index & i64(2) and count > 0:"),
        ("numba-border-of-the-counter", "count = min(count, left)", "count = min(count, count)"),
        ("numba-column-stride", "layouts[t, 0] + column * stride", "layouts[t, 0] + column"),
    ),
    *faults(
        "backends/numba/kernel.py",
        f"numerics/test_ops.py {_NUMBA} backends/test_matrices.py",
        ("numba-stream-of-the-first", "_integer_at(pointers[1, i])", "_integer_at(pointers[1, 0])"),
    ),
    *faults(
        "backends/numba/launch.py",
        _NUMBA,
        ("numba-base-ignored", "table[i, 0] = layout.base", "table[i, 0] = 0"),
    ),
    *faults(
        "backends/triton/lanes.py",
        _TRITON,
        ("triton-half-a-stream", "(stream >> 32).to(tl.uint32)", "(stream >> 63).to(tl.uint32)"),
    ),
    *faults(
        "backends/triton/kernel.py",
        f"{_TRITON} backends/test_triton_optimizer.py",
        ("triton-found-inf-half-ignored", "fast = tl.where(skip, 0, fast)", "fast = fast"),
        (
            "triton-scale-multiplies",
            "tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(grad_scale))",
            "tl.load(grad_scale)",
        ),
        ("triton-carry-lost", "wraps = tl.where(carry < to_end, 0, 1 +", "wraps = tl.where(carry < to_end, 0, 0 *"),
    ),
    *faults(
        "backends/triton/tables.py",
        "backends/test_triton_tables.py backends/test_triton.py",
        ("triton-odd-base-is-fast", "(layouts[:, 0] % 2 == 0)", "(layouts[:, 0] % 2 < 2)"),
        ("triton-misaligned-is-fast", "(pointers % ALIGNMENT == 0)", "(pointers % ALIGNMENT >= 0)"),
        ("triton-fast-to-the-end", "count // VECTOR * VECTOR", "count"),
        ("triton-two-keys-are-fast", "& (first_high == last_high)", "& (first_high <= last_high)"),
    ),
    *faults(
        "backends/triton/launch.py",
        f"{_TRITON} backends/test_triton_optimizer.py",
        ("triton-one-step-for-all", "if (pairs == pairs[0]).all():", "if (pairs[0] == pairs[0]).all():"),
    ),
]
