"""The Triton kernel gives the bits of the eager backend: the kernel itself, in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from subulp.backends import eager
from subulp.backends.bucket import Bucket
from subulp.formula.ops import absolute, div, maximum, sign, sqrt, where
from subulp.formula.rule import Rule, State
from subulp.numerics.layout import Layout, layout_of
from subulp.rounding import ADD, ADDCDIV, COPY, LERP
from subulp.rules.adamw import AMSGRAD, PLAIN, scalars_of
from tests.bits import same_bits

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
slow = pytest.mark.slow
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ADAMW_SCALARS = PLAIN.ordered(scalars_of(ADAMW, 3))
SIZES = (0, 1, 7, 8, 63, 1000, 0, 4096, 4097)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    # Triton decides when a kernel is decorated, so the backend is imported under this variable.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import subulp.backends.triton.kernel  # noqa: F401

        yield


def tensors(rule: Rule, sizes: Sequence[int], dtypes: Sequence[torch.dtype], seed: int = 0) -> list[list[Tensor]]:
    """Columns of random tensors: the target, the states (squares are positive), the reads."""
    generator = torch.Generator().manual_seed(seed)
    positive = [False, *(state.squared for state in rule.states), *(False for _ in rule.reads)]
    columns = []
    for dtype, squared in zip(dtypes, positive, strict=True):
        values = [torch.randn(n, generator=generator) for n in sizes]
        columns.append([(v * v if squared else v).to(dtype) for v in values])
    return columns


def bucket_of(
    rule: Rule,
    columns: Sequence[Sequence[Tensor]],
    scalars: Any = ADAMW_SCALARS,
    layouts: Sequence[Layout | None] | None = None,
    steps: Any = None,
    rows: Any = None,
) -> Bucket:
    count = len(columns[0])
    written = 1 + len(rule.states)
    table: Any = scalars if isinstance(scalars, Tensor) else np.array(scalars, dtype=np.float64, ndmin=2)
    return Bucket(
        [list(column) for column in columns[:written]],
        [list(column) for column in columns[written:]],
        list(layouts) if layouts is not None else [None] * count,
        [(1 << 62) + 977 * i for i in range(count)],
        np.full(count, 3, dtype=np.int64) if steps is None else steps,
        table,
        np.zeros(count, dtype=np.int64) if rows is None else rows,
    )


def copies(columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The same values at addresses of the same alignment."""
    return [[_copy(t) for t in column] for column in columns]


def _copy(t: Tensor) -> Tensor:
    offset = t.data_ptr() % 16 // t.element_size()
    return torch.empty(t.numel() + 16, dtype=t.dtype)[offset : offset + t.numel()].copy_(t)


def check(
    rule: Rule,
    columns: Sequence[Sequence[Tensor]],
    *,
    seed: int = (1 << 63) + 5,
    stochastic: bool = True,
    read_factor: float = 1.0,
    **bucket: Any,
) -> list[list[Tensor]]:
    """Runs both backends and compares every bit of every tensor; returns the result."""
    from subulp.backends.triton import launch as triton_gpu

    expected, actual = copies(columns), copies(columns)
    options: dict[str, Any] = {"seed": seed, "stochastic": stochastic, "read_factor": read_factor}
    with np.errstate(all="ignore"):  # The interpreter computes on the zeros beyond the end of a tile, too.
        eager.run(rule, bucket_of(rule, expected, **bucket), **options)
        triton_gpu.run(rule, bucket_of(rule, actual, **bucket), **options)
    for c, (a, b) in enumerate(zip(expected, actual, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert same_bits(x, y), f"column {c} of tensor {i} ({x.numel()} elements of {x.dtype})"
    changed = [not same_bits(x, y) for x, y in zip(columns[0], expected[0], strict=True) if x.numel() > 64]
    assert all(changed), "the update changed nothing, so the comparison shows nothing"
    return actual


@pytest.mark.parametrize(
    ("dtype", "stochastic"),
    [
        (BF16, True),
        pytest.param(BF16, False, marks=slow),
        pytest.param(FP16, True, marks=slow),
        pytest.param(FP16, False, marks=slow),
        pytest.param(FP32, True, marks=slow),
    ],
)
def test_sizes(dtype: torch.dtype, stochastic: bool) -> None:
    check(PLAIN, tensors(PLAIN, SIZES, [dtype] * 4), stochastic=stochastic)


@pytest.mark.parametrize(
    ("p", "m", "v", "g"),
    [(BF16, FP32, FP32, BF16), (BF16, BF16, FP32, FP32), (FP16, FP16, BF16, FP16), (FP32, BF16, BF16, FP32)],
)
def test_dtype_mixes_in_use(p: torch.dtype, m: torch.dtype, v: torch.dtype, g: torch.dtype) -> None:
    check(PLAIN, tensors(PLAIN, [75], [p, m, v, g]))


@slow
@pytest.mark.parametrize("dtypes", list(itertools.product([BF16, FP16, FP32], repeat=4)))
def test_every_dtype_mix(dtypes: Sequence[torch.dtype]) -> None:
    columns = tensors(PLAIN, [1, 73], dtypes)
    check(PLAIN, columns)
    check(PLAIN, columns, stochastic=False)


@pytest.mark.parametrize("stochastic", [True, False])
def test_amsgrad(stochastic: bool) -> None:
    check(AMSGRAD, tensors(AMSGRAD, [75], [BF16] * 5), stochastic=stochastic)


def test_maximize() -> None:
    check(PLAIN, tensors(PLAIN, [77], [BF16] * 4), read_factor=-1.0)


@pytest.mark.parametrize("rule", [COPY, ADD, ADDCDIV, LERP])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=slow)])
def test_rounding_primitives(rule: Rule, dtype: torch.dtype) -> None:
    columns = tensors(rule, [77], [dtype] + [FP32] * len(rule.reads))
    check(rule, columns, scalars=[0.3] * len(rule.scalars))


def _helper(x: Any, y: Any) -> Any:
    return where(x > y, absolute(x), -y)


def _named(p, s, g, a):
    s = maximum(s, _helper(g, p))
    return p - a * sign(g) * sqrt(absolute(div(g, s))), s


NAMED = Rule(_named, (State("s"),))


def _signs(p, s, g):
    return maximum(p, g), sign(g)


SIGNS = Rule(_signs, (State("s"),), keeps_nonfinite=False)


def test_named_functions_and_helper_formulas() -> None:
    columns = tensors(NAMED, [300], [BF16] * 3)
    columns[2][0][:20] = 0.0
    columns[2][0][20:40] = -0.0
    check(NAMED, columns, scalars=[0.01])
    special = torch.tensor([0.0, -0.0, float("nan"), float("-inf"), float("inf"), 2.0, -3.0])
    a, b = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    from subulp.backends.triton import launch as triton_gpu

    expected, actual = ([[a.clone()], [torch.zeros(49)], [b]] for _ in range(2))
    for backend, own in ((eager, expected), (triton_gpu, actual)):
        backend.run(SIGNS, bucket_of(SIGNS, own, scalars=[]), seed=0, stochastic=True)
    for (x,), (y,) in zip(expected, actual, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert same_bits(x.nan_to_num(123.0), y.nan_to_num(123.0))  # which NaN is not promised


@slow
def test_hundreds_of_tensors_with_empty_ones() -> None:
    sizes = [(0, 1, 5, 8, 9, 17, 64, 100)[(i * 7) % 8] for i in range(300)]
    check(PLAIN, tensors(PLAIN, sizes, [BF16] * 4))


def test_tensors_at_different_steps() -> None:
    sizes = [0, 3, 8, 70, 0, 1, 90]
    rows = np.arange(7) % 3
    scalars = np.array([ADAMW_SCALARS, np.multiply(ADAMW_SCALARS, 0.5), np.multiply(ADAMW_SCALARS, 0.7)])
    check(PLAIN, tensors(PLAIN, sizes, [BF16] * 4), scalars=scalars, rows=rows, steps=np.array([1, 2**32 - 1, 9])[rows])


@pytest.mark.parametrize(
    "offsets", [(7, 3, 1, 5), *(pytest.param(o, marks=slow) for o in [(1, 0, 0, 0), (0, 0, 4, 0), (2, 2, 2, 2)])]
)
def test_misaligned_views(offsets: Sequence[int]) -> None:
    size = 301
    columns = tensors(PLAIN, [size], [BF16] * 4)
    aligned = check(PLAIN, columns)
    moved = [
        [torch.empty(size + 16, dtype=BF16)[o : o + size].copy_(c[0])] for o, c in zip(offsets, columns, strict=True)
    ]
    assert any(t.data_ptr() % 16 for (t,) in moved)
    for (a,), (b,) in zip(aligned, check(PLAIN, moved), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(
    ("base", "size", "dtype"),
    [
        (1, 70, BF16),
        (2**33 - 30, 70, BF16),
        (2**32 - 31, 70, FP16),
        *(
            # Of three chunks the one with the boundary in it is not fast.
            pytest.param(base, 2060, dtype, marks=slow)
            for base in (2**32 - 2048, 2**33 - 1000, 2**33 - 1001, 2**40 + 2**33 - 2)
            for dtype in (BF16, FP16)
        ),
    ],
)
def test_global_indices_around_the_word_boundaries(base: int, size: int, dtype: torch.dtype) -> None:
    check(PLAIN, tensors(PLAIN, [size], [dtype] * 4), layouts=[Layout(base, (size,), (1,))])


@pytest.mark.parametrize(
    "layout",
    [
        layout_of((6, 5, 4, 3), (60, 1, 15, 5), (6, 5, 4, 3), (0, 0, 0, 0)),  # channels_last
        layout_of((7, 60), (60, 1), (7, 240), (0, 60)),  # a Shard(1) block
        Layout(5, (60,), (3,)),
        Layout(2**31, (3, 7, 5), (2**32 + 7, 5, 1)),
        Layout(2**33 - 40, (9, 11), (1, 9)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=slow)])
def test_strided_layouts(layout: Layout, dtype: torch.dtype) -> None:
    # Beside a plain tensor, whose row has to be filled up to as many dimensions.
    sizes = [int(np.prod(layout.sizes)), 67]
    check(PLAIN, tensors(PLAIN, sizes, [dtype] * 4), layouts=[layout, None])


@slow
def test_digits_of_a_long_dimension() -> None:
    # The carry out of the inner dimension happens inside and between chunks.
    layout = Layout(0, (3, 2500), (2**30, 2))
    check(PLAIN, tensors(PLAIN, [7500], [BF16] * 4), layouts=[layout])


SPECIAL = [0.0, -0.0, 1.0, -1.5, 1e-45, -3e-39, 1e-38, 6e-5, 6e-8, 3e-8, 65504.0, 65519.0, 65520.0, 1e30, 3.3895e38]
SPECIAL += [3.4028234e38, float("inf"), float("-inf"), float("nan"), 2**-14 - 2**-26, 2**-24, 2**-25]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_special_values_are_stored_alike(dtype: torch.dtype, stochastic: bool) -> None:
    source = torch.tensor(SPECIAL).repeat(6)
    check(COPY, [[torch.zeros(source.numel(), dtype=dtype)], [source]], stochastic=stochastic, scalars=[])


def test_signalling_nans_and_nan_signs_survive_a_copy() -> None:
    magnitudes = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], dtype=np.uint32)
    source = torch.from_numpy(np.concatenate([magnitudes, magnitudes | np.uint32(1 << 31)]).view(np.float32))
    target = torch.zeros(source.numel(), dtype=BF16)
    result = check(COPY, [[target], [source]], scalars=[])
    assert result[0][0].isnan().all()
    assert torch.equal(result[0][0].signbit(), torch.tensor([False] * 4 + [True] * 4))


def test_nonfinite_weights_stay_to_the_bit() -> None:
    columns = tensors(PLAIN, [80], [BF16] * 4)
    columns[0][0][::7] = float("inf")
    columns[0][0].view(torch.int16)[3::9] = 0x7F81
    result = check(PLAIN, columns)
    frozen = ~columns[0][0].isfinite()
    assert same_bits(result[0][0][frozen], columns[0][0][frozen])


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from subulp.backends.triton import tables as triton_tables

    columns = tensors(PLAIN, [2 * 1024 + 8], [BF16] * 4)
    small = check(PLAIN, columns, seed=1)
    monkeypatch.setattr(triton_tables, "PROGRAMS", 1)
    large = check(PLAIN, columns, seed=1, layouts=[Layout(0, (2 * 1024 + 8,), (1,))])
    assert same_bits(small[0][0], large[0][0])


# What only this backend does


def _result(columns: Sequence[Sequence[Tensor]], bucket: dict[str, Any], **options: Any) -> list[list[Tensor]]:
    from subulp.backends.triton import launch as triton_gpu

    result = copies(columns)
    triton_gpu.run(PLAIN, bucket_of(PLAIN, result, **bucket), seed=1, stochastic=True, **options)
    return result


def test_step_and_scalars_on_the_device() -> None:
    columns = tensors(PLAIN, [9, 0, 30], [BF16] * 4)
    rows = np.array([1, 0, 0])
    scalars = np.array([ADAMW_SCALARS, np.multiply(ADAMW_SCALARS, 0.5)])
    steps = np.array([4, 5])
    host = _result(columns, {"scalars": scalars, "rows": rows, "steps": steps[rows]})
    counters = torch.tensor([4.0, 5.0])
    device = _result(columns, {"scalars": torch.from_numpy(scalars), "rows": rows, "steps": counters})
    assert all(same_bits(a, b) for x, y in zip(host, device, strict=True) for a, b in zip(x, y, strict=True))


def test_grad_scale_divides_the_gradient() -> None:
    columns = tensors(PLAIN, [72], [BF16, BF16, BF16, FP32])
    scaled = [*columns[:3], [columns[3][0] * 1024]]
    plain, unscaled = _result(columns, {}), _result(scaled, {}, grad_scale=torch.tensor(1024.0))
    assert all(same_bits(plain[c][0], unscaled[c][0]) for c in range(3))
    ascent, both = (
        _result(columns, {}, read_factor=-1.0),
        _result(scaled, {}, grad_scale=torch.tensor(1024.0), read_factor=-1.0),
    )
    assert same_bits(ascent[0][0], both[0][0])


@pytest.mark.parametrize("flag", [1.0, float("inf"), float("nan")])
def test_found_inf_changes_nothing(flag: float) -> None:
    columns = tensors(PLAIN, [75], [BF16] * 4)
    skipped = _result(columns, {}, found_inf=torch.tensor(flag))
    assert all(same_bits(columns[c][0], skipped[c][0]) for c in range(4))
    taken = _result(columns, {}, found_inf=torch.tensor(0.0))
    assert same_bits(taken[0][0], _result(columns, {})[0][0])
