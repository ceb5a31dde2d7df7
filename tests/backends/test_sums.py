"""Sums of squares: squares are rounded to fp32, sums are fp64, and the native pass adds the same numbers as torch's."""

from __future__ import annotations

import math

import pytest
import torch

from subulp.backends import sums
from tests.models import generator


def block(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = generator(3)
    return (torch.randn(shape, generator=g) * 10.0 ** torch.randint(-6, 3, shape, generator=g)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (300, 257), (1, 70_000), (70_000, 1), (4, 6, 5)])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_exact_to_fp64(dtype, shape, threads):
    x = block(shape, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        row, col = sums.square_sums(x)
        total = sums.square_sum(x)
    finally:
        torch.set_num_threads(before)
    squares = x.to(torch.promote_types(dtype, torch.float32)).square().double()
    # Positive terms in any order: a relative error of at most n * 2**-53; the reference may have as much.
    for actual, expected, n in (
        (row, squares.sum(-1), shape[-1]),
        (col, squares.sum(-2), shape[-2]),
        (total, squares.sum(), x.numel()),
    ):
        assert actual.dtype == torch.float64
        assert actual.shape == expected.shape
        assert ((actual - expected).abs() <= 2 * n * 2.0**-53 * expected).all()


def test_the_native_pass_is_used_where_it_can_be(monkeypatch):
    pytest.importorskip("numba")

    def refuse(block: torch.Tensor) -> torch.Tensor:
        raise AssertionError("torch's path")

    monkeypatch.setattr(sums, "_squares", refuse)
    for dtype in (torch.bfloat16, torch.float32):
        sums.square_sums(block((5, 7), dtype))
        sums.square_sum(block((5, 7, 2), dtype))
    with pytest.raises(AssertionError, match="torch's path"):
        sums.square_sums(block((5, 7), torch.bfloat16).t())


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_their_sums_and_no_others(special):
    x = block((6, 40), torch.bfloat16)
    x[2, 3] = special
    row, col = sums.square_sums(x)
    expected = math.nan if math.isnan(special) else math.inf
    for sum_, i in ((row, 2), (col, 3)):
        assert torch.equal(sum_[i].nan_to_num(7.0), torch.tensor(expected).double().nan_to_num(7.0))
        others = torch.cat([sum_[:i], sum_[i + 1 :]])
        assert others.isfinite().all()
    assert not sums.square_sum(x).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("other_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (300, 257), (4, 6, 5)])
def test_weighted_sums_are_those_of_the_products_in_fp32(dtype, other_dtype, shape):
    """Every product and difference is rounded to fp32 in the same order as in torch; only the fp64 sums differ in order."""
    x, g = block(shape, dtype), generator(5)
    by_row, by_col = torch.rand((*shape[:-1], 1), generator=g), torch.rand((*shape[:-2], 1, shape[-1]), generator=g)
    products = by_row * by_col * x.float()
    squares = products.square().double().view(-1)
    total = sums.weighted_square_sum(x, by_row, by_col)
    assert abs(total - squares.sum()) <= 2 * len(squares) * 2.0**-53 * squares.sum()
    other, factor = block(shape, other_dtype), torch.tensor(1.7)
    row, col = sums.deviation_square_sums(x, by_row, by_col, other, factor)
    squares = (products - other.float() * factor).square().double()
    for actual, expected, n in ((row, squares.sum(-1), shape[-1]), (col, squares.sum(-2), shape[-2])):
        assert ((actual - expected).abs() <= 2 * n * 2.0**-53 * expected).all()
