"""Sums, factored updates and the optimizers on them, in Triton's interpreter: the bits of the eager backend."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import subulp
from tests.backends.test_matrices import every_sum, matrices_of, updated
from tests.bits import same_bits
from tests.models import everything, make_params, train

pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    # Triton decides when a kernel is decorated, so the backend is imported under this variable.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("TRITON_INTERPRET", "1")
        import subulp.backends.triton.matrices  # noqa: F401

        yield


SHAPES: list[list[tuple[int, ...]]] = [
    [(3, 5), (0, 4), (1, 1)],
    [(70, 130), (64, 64)],
    [(3, 2500), (2000,)],
    [(2, 3, 4), (3, 65, 2)],
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_sums_and_updates_have_the_bits_of_eager(shapes):
    matrices = matrices_of(shapes)
    for factor in (1.0, -0.3):
        assert all(map(torch.equal, every_sum(matrices, "triton", factor), every_sum(matrices, "eager", factor)))
        options = {"factor": factor, "stochastic": factor == 1.0}
        expected = updated(shapes, "eager", torch.bfloat16, **options)
        assert all(map(same_bits, updated(shapes, "triton", torch.bfloat16, **options), expected))


def test_a_part_of_a_larger_tensor_draws_its_own_noise():
    shape, block = (9, 31), ((1 << 20, 8192), (524286, 17))
    expected = updated([shape], "eager", torch.bfloat16, block)
    assert all(map(same_bits, updated([shape], "triton", torch.bfloat16, block), expected))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (subulp.Adafactor, {"beta1": 0.9}),
        (subulp.Adafactor, {"semantics": "torch"}),
        (subulp.CAME, {"lr": 1e-2, "weight_decay": 0.1}),
        (subulp.Prodigy, {"d0": 1e-2, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_optimizers_have_the_bits_of_eager(cls, options):
    results = []
    for backend in ("eager", "triton"):
        params = make_params(((5, 7), (9,), (2, 3, 4)))
        opt = cls(params, backend=backend, stream=0, **options)
        train(opt, params, 3)
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))
