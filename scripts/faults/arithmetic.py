"""Faults in noise, formats, special values and layouts, as torch computes them (the reference of every backend)."""

from __future__ import annotations

from faults import faults

MUTANTS = [
    *faults(
        "formula/noise.py",
        "numerics/test_noise.py",
        ("noise-7-rounds", "PHILOX_ROUNDS = 10", "PHILOX_ROUNDS = 7"),
        ("noise-wide-slots-share-a-word", "WIDE_WORD + slot", "WIDE_WORD + 0 * slot"),
        ("noise-narrow-and-wide-share-words", "WIDE_WORD = 128", "WIDE_WORD = 0"),
    ),
    *faults(
        "formula/ops.py",
        "numerics/test_ops.py backends/test_numba.py",
        ("ops-torchs-root", "x.double().sqrt().float()", "x.sqrt()"),
    ),
    *faults(
        "rounding.py",
        "numerics/test_rounding.py",
        ("rounding-offset-ignored", "[target.detach()], reads, offset)", "[target.detach()], reads, 0)"),
        ("rounding-alpha-ignored", "p + alpha * other", "p + other"),
        ("rounding-lerp-from-zero", "p + weight * (end - p)", "p + weight * end"),
        ("rounding-step-ignored", "single(views, stream, step, scalars)", "single(views, stream, 0, scalars)"),
    ),
    *faults(
        "numerics/layout.py",
        "numerics/test_layout.py test_optimizer.py",
        ("layout-stride-ignored", "(rest % size) * stride", "(rest % size)"),
        ("layout-merges-everything", "strides[-1] == global_strides[d] * shape[d]", "True"),
        ("layout-base-ignored", ".mul_(self.strides[0]).add_(self.base)", ".mul_(self.strides[0])"),
        ("layout-gaps-are-dense", "if t.stride(d) != expected:", "if t.stride(d) < expected:"),
    ),
    *faults(
        "numerics/views.py",
        "test_optimizer.py numerics/test_rounding.py",
        ("views-copies-not-returned", "views.copies.append((t, copy))", "pass"),
        ("views-parts-share-noise", "shape, offset = (*shape, 2), (*offset, 0)", "pass"),
        ("views-base-ignored", "like.stride(), shape, offset, base)", "like.stride(), shape, offset, 0)"),
    ),
    *faults(
        "numerics/streams.py",
        "numerics/test_streams.py training/test_ema.py training/test_accumulation.py",
        ("streams-optimizers-share-them", "% _NUMBERS) << 32", "% _NUMBERS) << 0"),
        ("streams-position-ignored", "or 0) + position", "or 0)"),
        ("streams-taken-ones-given-again", "_take_free(first % (1 << BITS), following)", "first % (1 << BITS)"),
        (
            "streams-helpers-take-the-optimizers",
            'stream_of_name(f"{kind}.{name}") if name',
            "stream_of_name(name) if name",
        ),
        ("streams-helpers-share-them", 'stream_of_name(f"{kind}.{i}") + base)', 'stream_of_name(f"{kind}.{i}"))'),
        ("streams-zeros-names-are-used", "names and len(names) != len", "False and len(names) != len"),
    ),
    *faults(
        "backends/eager.py",
        "backends/test_nonfinite.py backends/test_plans.py test_adamw.py numerics/test_rounding.py test_optimizer.py",
        ("eager-steps-share-noise", "int(bucket.steps[i]))", "0 * int(bucket.steps[i]))"),
        (
            "eager-chunks-share-noise",
            "torch.arange(start, stop, device=device)",
            "torch.arange(stop - start, device=device)",
        ),
    ),
]
