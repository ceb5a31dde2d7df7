"""Storage order against global index, checked against explicit enumeration."""

import itertools

import pytest
import torch

from subulp.numerics.layout import Layout, is_dense, layout_of, row_major_strides


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 3), (2, 3, 4, 5), (1,), (), (3, 1, 1, 2)])
def test_every_permutation_of_dimensions(shape):
    for order in itertools.permutations(range(len(shape))):
        t = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        assert t.shape == shape
        assert is_dense(t)
        layout = layout_of(tuple(t.shape), t.stride(), tuple(t.shape), (0,) * len(shape))
        numel = t.numel()
        expected = torch.empty_strided(shape, t.stride(), dtype=torch.int64).copy_(torch.arange(numel).view(shape))
        flat = expected.as_strided((numel,), (1,))
        assert torch.equal(layout.indices(0, numel, torch.device("cpu")), flat)
        assert torch.equal(layout.indices(1, numel, torch.device("cpu")), flat[1:])


@pytest.mark.parametrize("offset", [(0, 0, 0), (1, 2, 1), (2, 0, 3)])
def test_a_block_of_a_larger_tensor(offset):
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    block = whole[offset[0] : offset[0] + 2, offset[1] : offset[1] + 3, offset[2] : offset[2] + 2]
    layout = layout_of((2, 3, 2), (6, 2, 1), (4, 5, 6), offset)
    assert torch.equal(layout.indices(0, 12, torch.device("cpu")), block.flatten())


def test_contiguous_tensors_have_one_dimension():
    layout = layout_of((4, 5, 6), (30, 6, 1), (4, 5, 6), (0, 0, 0), 7)
    assert (layout.base, layout.sizes, layout.strides) == (7, (120,), (1,))
    rows = layout_of((2, 5), (5, 1), (9, 5), (3, 0))
    assert (rows.base, rows.sizes, rows.strides) == (15, (10,), (1,))


def test_gaps_and_overlap_are_not_dense():
    assert not is_dense(torch.empty(4, 6)[:, ::2])
    assert not is_dense(torch.empty(1, 6).expand(4, 6))
    assert not is_dense(torch.empty(4, 6)[:, :3])
    assert is_dense(torch.empty(4, 6)[1:3])
    assert row_major_strides((2, 0, 3)) == (3, 3, 1)


def test_one_dimension_begins_at_its_base_and_keeps_its_stride():
    assert Layout(5, (6,), (2,)).indices(1, 4, torch.device("cpu")).tolist() == [7, 9, 11]
