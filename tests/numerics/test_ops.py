"""The named functions of formulas on tensors: correctly rounded, and what they do with zeros and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from subulp.backends import eager
from subulp.backends.bucket import single
from subulp.formula import ops
from subulp.formula.ops import absolute, maximum, sign, where
from subulp.formula.rule import Rule, State
from subulp.numerics.views import flat_views
from tests.bits import same_bits
from tests.models import generator

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("size", [7, 10_000])
def test_the_root_is_correctly_rounded(size):
    """torch's own vectorised root is an ulp off for a fifth of its inputs; numpy's is exact."""
    x = torch.rand(size, generator=generator(0)) * 4
    assert same_bits(ops.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))


def test_the_quotient_is_correctly_rounded():
    a, b = (torch.randn(10_000, generator=generator(i)) for i in range(2))
    assert same_bits(ops.div(a, b), (a.double() / b.double()).float())


def test_zeros_and_nan():
    x = torch.tensor([0.0, -0.0, NAN, -INF, INF, 2.0, -3.0])
    assert same_bits(ops.sign(x), torch.tensor([0.0, -0.0, NAN, -1.0, 1.0, 1.0, -1.0]))
    a, b = torch.tensor([NAN, 1.0, 2.0, -INF]), torch.tensor([1.0, NAN, 1.0, 3.0])
    assert same_bits(ops.maximum(a, b).isnan(), torch.tensor([True, True, False, False]).view(torch.bool))
    assert ops.maximum(a, b)[2:].tolist() == [2.0, 3.0]


def _named(p, x, y, a, b):
    return maximum(a, b), sign(a), where(a > b, absolute(a), -b)


NAMED = Rule(_named, (State("x"), State("y")), reads=("a", "b"), keeps_nonfinite=False)


def test_the_cpu_kernels_give_the_same_for_zeros_and_nan():
    numba_cpu = pytest.importorskip("subulp.backends.numba.launch", reason="pip install numba")
    special = torch.tensor([0.0, -0.0, NAN, -INF, INF, 2.0, -3.0])
    a, b = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    results = []
    for backend in (eager, numba_cpu):
        written = [torch.zeros(a.shape) for _ in range(3)]
        backend.run(NAMED, single(flat_views(written, [a, b]), 1, 1, ()), seed=0, stochastic=True)
        results.append(written)
    for first, second in zip(*results, strict=True):
        assert same_bits(first, second)
