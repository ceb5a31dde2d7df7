"""Sums over stacks of matrices and updates with factors: one order of additions and equal bits on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from subulp.backends import eager_sums, sums
from subulp.backends.matrices import Matrices, Stacks
from subulp.formula.compose import compose, part, quantity
from subulp.formula.factors import deviation, weighed
from subulp.formula.rule import State
from subulp.numerics.layout import layout_of, row_major_strides
from subulp.rules.factored import OF_GRADIENT, square
from subulp.rules.parts import averaged, decayed
from tests.bits import same_bits
from tests.models import generator

pytest.importorskip("numba")

WEIGHED = quantity(weighed, square)
DEVIATION = quantity(part("u", by_row=["r"], by_col=["c"])(deviation), square, reads=("g", "m"))
UPDATE = compose(weighed, averaged, decayed.of(u="m"), states={"m": State("exp_avg")})

SHAPES: list[list[tuple[int, ...]]] = [
    [(3, 5)],
    [(64, 64), (1, 1), (64, 64)],
    [(300, 257), (129, 1500)],
    [(2000,)],
    [(4, 6, 5), (2, 3, 4, 70)],
    [(3, 2500)],
    [(4200, 3)],
    [(0, 4), (4, 0), (3, 3), (0,)],
]


def matrices_of(shapes: Any, dtype: torch.dtype = torch.bfloat16, other: torch.dtype = torch.float32) -> Matrices:
    g = generator(3)
    columns = {"g": [torch.randn(s, generator=g).to(dtype) for s in shapes]}
    columns["m"] = [torch.randn(s, generator=g).to(other) for s in shapes]
    return Matrices(columns)


def factors_of(matrices: Matrices) -> dict[str, Tensor]:
    g = generator(4)
    rows, cols = int(matrices.stacks.row_starts[-1]), int(matrices.stacks.col_starts[-1])
    return {"r": torch.rand(rows, generator=g), "c": torch.rand(cols, generator=g)}


def every_sum(matrices: Matrices, backend: str, factor: float = 1.0) -> list[Tensor]:
    factors = factors_of(matrices)
    over = ("rows", "cols", "all")
    found = [
        sums.sums(OF_GRADIENT, matrices, over, {}, {}, backend=backend, factor=factor),
        sums.sums(WEIGHED, matrices, ("all",), factors, {}, backend=backend, factor=factor),
        sums.sums(DEVIATION, matrices, ("rows", "cols"), factors, {"factor": 1.7}, backend=backend, factor=factor),
    ]
    return [t for result in found for t in result.values()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_sums_have_the_same_bits_on_every_backend(shapes, dtype):
    matrices = matrices_of(shapes, dtype)
    for factor in (1.0, -0.3):
        expected = every_sum(matrices, "eager", factor)
        assert all(map(torch.equal, every_sum(matrices, "numba", factor), expected))


@pytest.mark.parametrize("shape", [(300, 257), (129, 1500), (4, 6, 5), (5000,)])
@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_sums_are_those_of_fp64(shape, backend):
    """The squares, products and differences are rounded to fp32 as torch does it; what is left is n additions in fp64, each
    with a relative error of at most 2**-53 of a partial sum that is not above the total."""
    matrices = matrices_of([shape])
    g, m = (matrices.columns[name][0].float() for name in ("g", "m"))
    factors = factors_of(matrices)
    g, m = (t.view(tuple(matrices.stacks.shapes[0])) for t in (g, m))
    r, c = factors["r"].view(g.shape[0], -1, 1), factors["c"].view(g.shape[0], 1, -1)
    u, d = r * c * g, r * c * g - m * 1.7
    exact = [g.square().double().sum(-1), g.square().double().sum(-2), g.square().double().sum()]
    exact += [u.square().double().sum(), d.square().double().sum(-1), d.square().double().sum(-2)]
    for actual, expected in zip(every_sum(matrices, backend), exact, strict=True):
        bound = 2 * g.numel() * 2.0**-53 * expected.view(-1)
        assert ((actual - expected.view(-1)).abs() <= bound).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_sums_do_not_depend_on_threads_or_company(threads):
    shapes = [(700, 1030), (5, 3), (300_000,)]
    one = every_sum(matrices_of(shapes), "numba")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert all(map(torch.equal, every_sum(matrices_of(shapes), "numba"), one))
    finally:
        torch.set_num_threads(before)
    matrices = matrices_of(shapes)
    for i in range(len(shapes)):
        own = Matrices({"g": matrices.columns["g"][i : i + 1]})
        found = sums.sums(OF_GRADIENT, own, ("all",), {}, {}, backend="numba")["all"]
        assert torch.equal(found, one[2][i : i + 1])


def test_a_single_large_number_shows_the_order():
    """2**53 swallows ones that are added to it singly, not those that meet each other first: each order has its own sum."""
    x = torch.ones(1, 2048)
    x[0, 0] = 2.0**53
    for backend in ("eager", "numba"):
        matrices = Matrices({"g": [x]})
        found = sums.sums(quantity(part("x")(lambda g: g)), matrices, ("rows",), {}, {}, backend=backend)["rows"]
        # Lane 0 of the first piece adds its 31 ones to 2**53 one by one: all are lost. The other 31 lanes bring 32 each, and
        # the second piece 1024.
        assert found.item() == 2.0**53 + 31 * 32 + 1024


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_specials_reach_their_own_sums_alone(special):
    matrices = matrices_of([(70, 1100)])
    matrices.columns["g"][0][66, 1050] = special
    for backend in ("eager", "numba"):
        found = sums.sums(OF_GRADIENT, matrices, ("rows", "cols", "all"), {}, {}, backend=backend)
        for name, i in (("rows", 66), ("cols", 1050), ("all", 0)):
            assert not found[name][i].isfinite()
            assert torch.cat([found[name][:i], found[name][i + 1 :]]).isfinite().all()


def updated(shapes: Any, backend: str, dtype: torch.dtype, blocks: Any = None, **options: Any) -> list[Tensor]:
    matrices = matrices_of(shapes, dtype)
    g = generator(5)
    columns = {name: [torch.randn(s, generator=g).to(dtype) for s in shapes] for name in ("p", "m")}
    columns["g"] = list(matrices.columns["g"])
    factors, count = factors_of(matrices), len(shapes)
    layouts = [layout_of(s, row_major_strides(s), *(blocks or (s, (0,) * len(s)))) for s in shapes]
    scalars = {"beta1": 0.9, "share": torch.arange(1.0, 1.0 + count).double() / 7, "decay": 1e-3}
    stacks = Stacks(shapes, layouts, list(range(count)))
    arguments = (UPDATE, Matrices(columns, stacks), [5] * count, factors, scalars)
    sums.run_factored(*arguments, backend=backend, **{"seed": 1, "stochastic": True, **options})
    return [*columns["p"], *columns["m"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_updates_with_factors_have_the_same_bits_on_every_backend(shapes, dtype):
    for options in ({}, {"factor": -0.3, "stochastic": False}):
        expected = updated(shapes, "eager", dtype, **options)
        assert all(map(same_bits, updated(shapes, "numba", dtype, **options), expected))


def test_an_update_with_factors_is_its_formula():
    shape = (3, 4, 70)
    matrices = matrices_of([shape], torch.float32)
    factors = factors_of(matrices)
    g = generator(5)
    p, m = (torch.randn(shape, generator=g) for _ in range(2))
    u = factors["r"].view(3, 4, 1) * factors["c"].view(3, 1, 70) * matrices.columns["g"][0]
    m = 0.9 * m + torch.tensor(1 / 7) * u
    expected = [p - (torch.tensor(1e-3) * p + m), m]
    assert all(map(same_bits, updated([shape], "numba", torch.float32), expected))


def test_a_part_of_a_larger_tensor_draws_its_own_noise():
    """A block of a matrix, as a shard is, beyond the index 2**32 and across it."""
    shape, whole = (9, 301), (1 << 20, 8192)
    for offset in ((0, 0), (524286, 17), (700_000, 7001)):
        expected = updated([shape], "eager", torch.bfloat16, (whole, offset))
        assert all(map(same_bits, updated([shape], "numba", torch.bfloat16, (whole, offset)), expected))


def test_threads_and_blocks_do_not_change_an_update(monkeypatch):
    shapes = [(700, 1030), (5, 3)]
    one = updated(shapes, "numba", torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(same_bits, updated(shapes, "numba", torch.bfloat16), one))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(eager_sums, "BLOCK", 100)
    small = every_sum(matrices_of(shapes), "eager")
    monkeypatch.undo()
    assert all(map(torch.equal, small, every_sum(matrices_of(shapes), "eager")))
