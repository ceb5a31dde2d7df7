"""Faults in the Numba and Triton twins of the arithmetic, in their tables and in the native sums."""

from __future__ import annotations

from faults import faults

_NUMBA = "backends/test_numba.py"
_TRITON = "backends/test_triton.py"

MUTANTS = [
    *faults(
        "backends/numba/lanes.py",
        f"backends/test_nonfinite.py {_NUMBA}",
        ("numba-mix-other-shift", "x >> u32(17)", "x >> u32(16)"),
        ("numba-mix-counter-not-added", "u32(u32(x ^ (x >> u32(14))) ^ counter)", "u32(x ^ (x >> u32(14)))"),
        ("numba-bf16-becomes-infinite", "magnitude < i32(0x7F7F0000)", "magnitude < i32(0x7F800000)"),
        ("numba-bf16-nearest-ties-down", "u32((bits >> u32(16)) & u32(1))", "u32(0)"),
        ("numba-fp16-becomes-infinite", "code if code < u32(0x7BFF) else u32(0x7BFF)", "code"),
        ("numba-fp16-nan-becomes-infinite", "u32(0x7E00) if magnitude", "u32(0x7C00) if magnitude"),
        ("numba-fp16-subnormals", "u32(u32(113) - exponent) if", "u32(u32(112) - exponent) if"),
        ("numba-fp16-pairs-share-noise", "word(builder.or_(even, _WORD(1)))", "word(even)"),
        (
            "numba-halves-swapped",
            "[builder.and_(both, _WORD(0xFFFF)), builder.lshr(both, _WORD(16))]",
            "[builder.lshr(both, _WORD(16)), builder.and_(both, _WORD(0xFFFF))]",
        ),
        ("numba-single-halves-swapped", "builder.select(is_odd, high, low)", "builder.select(is_odd, low, high)"),
        ("numba-nonfinite-changes", '"<", magnitude, _WORD(0x7F800000)', '"<=", magnitude, _WORD(0x7F800000)'),
        ("numba-fp16-words-of-bf16", '128 + slot if d == "fp16" else slot', "slot"),
    ),
    *faults(
        "backends/numba/body.py",
        f"backends/test_plans.py {_NUMBA}",
        ("numba-narrow-high-word", "else index >> i64(33)", "else index >> i64(32)"),
        ("numba-keys-of-the-first-slots", "if block != last:", "if last < i64(0):"),
        ("numba-half-a-stream", "u64(stream >> i64(32))", "u64(0)"),
        ("numba-half-a-seed", "u64(seed >> u64(32))", "u64(0)"),
        ("numba-counter-stands", "counter = u32(counter + u32(1))", "counter = u32(counter + u32(0))"),
        ("numba-odd-start", "if index & i64(1) and count > 0:", "if index & i64(2) and count > 0:"),
        ("numba-border-of-the-counter", "count = min(count, left)", "count = min(count, count)"),
        ("numba-column-stride", "layouts[t, 0] + column * stride", "layouts[t, 0] + column"),
        ("numba-element-stride", "index + j * stride, scalars", "index + j, scalars"),
    ),
    *faults(
        "backends/numba/kernel.py",
        f"numerics/test_ops.py {_NUMBA} backends/test_numba_rows.py",
        ("numba-maximum-forgets-nan", "a if (a > b or a != a) else b", "a if a > b else b"),
        ("numba-sign-of-zero-and-nan", "f32(-1) if x < f32(0) else x", "f32(-1) if x < f32(0) else f32(0)"),
        ("numba-stream-of-the-first", "_integer_at(pointers[1, i])", "_integer_at(pointers[1, 0])"),
        ("numba-factor-ignored", "builder.fmul(read[0], args[2])", "read[0]"),
        (
            "numba-factor-of-every-read",
            "read[:1] = [builder.fmul(read[0], args[2])]",
            "read[:] = [builder.fmul(r, args[2]) for r in read]",
        ),
    ),
    *faults(
        "backends/numba/launch.py",
        _NUMBA,
        ("numba-base-ignored", "table[i, 0] = layout.base", "table[i, 0] = 0"),
    ),
    *faults(
        "backends/numba/rows.py",
        "backends/test_numba_rows.py",
        ("rows-block-starts-at-the-top", "(offset[0] + number) * columns + offset[1]", "number * columns + offset[1]"),
        (
            "rows-block-starts-at-the-left",
            "(offset[0] + number) * columns + offset[1]",
            "(offset[0] + number) * columns",
        ),
        ("rows-narrower-than-the-whole", "(offset[0] + number) * columns +", "(offset[0] + number) * width +"),
    ),
    *faults(
        "backends/numba/sums.py",
        "backends/test_sums.py",
        ("sums-fourth-row-not-in-columns", "(s0 + s1) + (s2 + s3)", "(s0 + s1) + (s2 + s2)"),
        ("sums-one-thread-of-columns", "cols.sum(0)", "cols[0]"),
        ("sums-one-thread-of-the-total", "float(totals.sum())", "float(totals[0])"),
        ("sums-deviation-added", "r * c * x - y * factor", "r * c * x + y * factor"),
        ("sums-in-fp32", "np.float64(value * value)", "np.float32(value * value)"),
        ("sums-squares-in-fp64", "np.float64(value * value)", "np.float64(value) * np.float64(value)"),
    ),
    *faults(
        "backends/sums.py",
        "backends/test_sums.py",
        ("sums-torch-deviation-factor", "other.to(by_row.dtype) * factor", "other.to(by_row.dtype)"),
        ("sums-torch-in-fp32", "return t.sum(dim, dtype=torch.float64)", "return t.sum(dim)"),
    ),
    *faults(
        "backends/triton/lanes.py",
        _TRITON,
        ("triton-mix-second-key-ignored", "x ^ (x >> 11) ^ k1", "x ^ (x >> 11)"),
        (
            "triton-halves-swapped",
            "return word & 0xFFFF, word >> 16\n\n\n@triton.jit\ndef single",
            "return word >> 16, word & 0xFFFF\n\n\n@triton.jit\ndef single",
        ),
        ("triton-single-halves-swapped", "(index & 1) == 1, word >> 16", "(index & 1) == 0, word >> 16"),
        ("triton-high-counter-ignored", "((high << 8) | (WORD // 2))", "((high * 0) | (WORD // 2))"),
        ("triton-half-a-stream", "(stream >> 32).to(tl.uint32)", "(stream >> 63).to(tl.uint32)"),
        ("triton-fp16-pairs-share-noise", "mix(counter + 1, k0, k1)", "mix(counter, k0, k1)"),
        ("triton-wide-last-high-word", "range(1, last_high - first_high + 1)", "range(1, last_high - first_high)"),
        ("triton-bf16-becomes-infinite", "255 * 2.0**120", "256 * 2.0**119 * 2"),
        ("triton-bf16-nearest-ties-down", "bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x7FFF"),
        (
            "triton-fp16-becomes-infinite",
            "tl.where(code < 0x7BFF, code, 0x7BFF)",
            "tl.where(code < 0x7C00, code, 0x7C00)",
        ),
        ("triton-fp16-nan-becomes-infinite", "0x7F800000, 0x7E00, code", "0x7F800000, 0x7C00, code"),
        (
            "triton-signalling-nan",
            "code = tl.where(x == x, code, code | 0x00400000)",
            "code = tl.where(x == x, code, code)",
        ),
        ("triton-nonfinite-changes", "< _INFINITY, code, old_code", "<= _INFINITY, code, old_code"),
    ),
    *faults(
        "backends/triton/kernel.py",
        f"{_TRITON} backends/test_triton_optimizer.py",
        ("triton-maximum-forgets-nan", "(a > b) | (a != a)", "(a > b)"),
        ("triton-sign-of-zero-and-nan", "tl.where(x < 0, -1.0, x)", "tl.where(x < 0, -1.0, 0.0)"),
        ("triton-found-inf-half-ignored", "fast = tl.where(skip, 0, fast)", "fast = fast"),
        ("triton-factor-ignored", '"SCALED": scaled or has_grad_scale', '"SCALED": has_grad_scale'),
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
