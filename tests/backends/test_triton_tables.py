"""The tables of the Triton kernel: every element once, fast only where that is allowed, found again by content."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subulp.backends.triton.tables import (
    CHUNK,
    PROGRAMS,
    TILE,
    VECTOR,
    DeviceTables,
    chunk_map,
    fast_tensors,
    layout_table,
)
from subulp.numerics.layout import Layout

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 5 * TILE), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 1, 2, 2**32 - 1000, 2**33 - 3000]), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_chunks_cover_every_element_once(sizes: list[int], bases: list[int], aligned: list[bool]) -> None:
    counts = np.array(sizes)
    layouts = layout_table([Layout(base, (n,), (1,)) for n, base in zip(sizes, bases, strict=False)], counts)
    pointers = np.where(np.array(aligned[: len(sizes)]), 1 << 20, (1 << 20) + 2)[:, None]
    fast = fast_tensors(pointers, layouts)
    seen = [np.zeros(n, dtype=np.int64) for n in sizes]
    for tensor, start, count, fast_count, first_high, last_high in chunk_map(counts, fast, layouts).tolist():
        seen[tensor][start : start + count] += 1
        assert start % VECTOR == 0
        assert fast_count % VECTOR == 0
        assert first_high == (bases[tensor] + start) >> 32
        assert last_high == (bases[tensor] + start + count - 1) >> 32
        if fast_count:
            assert aligned[tensor]
            assert bases[tensor] % 2 == 0
            assert first_high == last_high
            assert count - fast_count < VECTOR
    assert all((counts == 1).all() for counts in seen)


def test_only_aligned_rows_of_even_indices_are_fast() -> None:
    layouts = [None, Layout(2, (64,), (1,)), Layout(3, (64,), (1,)), Layout(0, (64,), (2,)), Layout(0, (8, 8), (1, 8))]
    table = layout_table(layouts, np.full(5, 64))
    assert fast_tensors(np.full((5, 4), 4096), table).tolist() == [True, True, False, False, False]
    assert fast_tensors(np.array([[4096, 4096 + 8]] * 5), table).tolist() == [False] * 5


def test_layout_rows_are_filled_up_with_dimensions_of_size_one() -> None:
    table = layout_table([None, Layout(7, (8, 9), (1, 8))], np.array([64, 72]))
    assert table.tolist() == [[0, 1, 64, 0, 1], [7, 8, 9, 1, 8]]


def test_indices_of_a_strided_tensor_span_all_its_words() -> None:
    layouts = layout_table([Layout(2**32 - 1, (2, 3), (2**33, 1))], np.array([6]))
    ((_, _, count, fast_count, first_high, last_high),) = chunk_map(
        np.array([6]), fast_tensors(np.array([[4096]]), layouts), layouts
    ).tolist()
    assert (count, fast_count, first_high, last_high) == (6, 0, 0, 3)


def test_chunks_of_a_large_tensor_are_long_and_their_starts_are_64_bit() -> None:
    size = 2**31 + 1000
    layouts = layout_table([None], np.array([size]))
    chunks = chunk_map(np.array([size]), np.array([True]), layouts)
    assert chunks.dtype == np.int64
    assert len(chunks) == -(-size // CHUNK)
    assert chunks[-1].tolist() == [0, 2**31, 1000, 1000, 0, 0]


def test_a_small_bucket_is_spread_over_many_programs() -> None:
    size = TILE * PROGRAMS
    layouts = layout_table([None], np.array([size]))
    assert len(chunk_map(np.array([size]), np.array([True]), layouts)) == PROGRAMS


def test_tables_are_found_by_content_and_the_oldest_is_dropped() -> None:
    tables = DeviceTables(capacity=2)
    built: list[str] = []

    def get(name: str) -> torch.Tensor:
        def build() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
            built.append(name)
            return np.array([len(built)])

        return tables.get(name, build, CPU, capturable=True)

    a = get("a")
    assert get("a") is a
    get("b")
    get("a")
    get("c")  # drops b, which was used longest ago
    assert get("a") is a
    get("b")
    assert built == ["a", "b", "c", "b"]


def test_a_capture_without_a_step_before_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subulp.backends.triton.tables.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="at least one step with capturable=True outside the capture"):
        DeviceTables(capacity=2).get("a", lambda: np.array([1]), CPU, capturable=True)
