"""``high_sum``, which each backend computes in its own way, against Python's integers over its whole domain."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from subulp.formula.ops import high_sum
from subulp.formula.words import Word


def cases() -> tuple[np.ndarray, np.ndarray]:
    """Numbers of every binade below 2**54, halves and multiples of 2**32; draws of both ends and around a carry."""
    generator = np.random.default_rng(0)
    binades = np.ldexp(1 + generator.random(20_000), generator.integers(-149, 53, 20_000))
    fractions = np.ldexp(generator.random(20_000), 32) + np.ldexp(generator.integers(0, 2048, 20_000), 32)
    whole = np.arange(0, 4096) * 2.0**31
    numbers = np.concatenate([binades, fractions, whole, [0.0, 2.0**-149, 2.0**54 - 2.0**30]]).astype(np.float32)
    threshold = (1 << 32) - numbers.astype(np.int64)
    draws = [np.full(numbers.size, d) for d in (0, 1, 0x1FF, 0x200, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFFFF)]
    draws += [threshold - 1, threshold, threshold + 1, generator.integers(0, 1 << 32, numbers.size)]
    return np.tile(numbers, len(draws)), (np.concatenate(draws) & 0xFFFFFFFF).astype(np.uint32)


def exact(numbers: np.ndarray, draws: np.ndarray) -> np.ndarray:
    return ((numbers.astype(np.int64) + draws.astype(np.int64)) >> 32).astype(np.uint32)


def test_eager() -> None:
    numbers, draws = cases()
    result = high_sum(torch.from_numpy(numbers), Word(torch.from_numpy(draws.view(np.int32)))).bits
    assert isinstance(result, torch.Tensor)
    assert np.array_equal(result.numpy().view(np.uint32), exact(numbers, draws))


def test_numba() -> None:
    numba = pytest.importorskip("numba")
    from numba.extending import intrinsic

    from subulp.backends.numba import trace

    @intrinsic
    def summed(typing_context: Any, number: Any, draw: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return trace.traced(high_sum)(trace.Number(builder, args[0]), trace.Word(builder, args[1])).value

        return numba.uint32(numba.float32, numba.uint32), emit

    @numba.njit
    def over(numbers, draws, out):
        for i in range(numbers.size):
            out[i] = summed(numbers[i], draws[i])

    numbers, draws = cases()
    out = np.empty_like(draws)
    over(numbers, draws, out)
    assert np.array_equal(out, exact(numbers, draws))


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    import triton.language as tl

    from subulp.backends.triton.bindings import jitted

    @triton.jit
    def over(numbers, draws, out, count, SUM: tl.constexpr, BLOCK: tl.constexpr):
        j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(draws + j, mask=j < count).to(tl.uint32, bitcast=True)
        total = SUM(tl.load(numbers + j, mask=j < count, other=0.0), word)
        tl.store(out + j, total.to(tl.int32, bitcast=True), mask=j < count)

    numbers, draws = cases()
    out = torch.empty(numbers.size, dtype=torch.int32)
    arguments = torch.from_numpy(numbers), torch.from_numpy(draws.view(np.int32)), out, numbers.size
    over[(triton.cdiv(numbers.size, 1 << 16),)](*arguments, SUM=jitted(high_sum), BLOCK=1 << 16)
    assert np.array_equal(out.numpy().view(np.uint32), exact(numbers, draws))
