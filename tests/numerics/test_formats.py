"""Rounding one value: unbiased by enumeration, fixed points, special values, saturation."""

import math

import numpy as np
import pytest
import torch

from subulp.backends.eager import load, store
from subulp.formula.words import Word
from subulp.storage import CODECS
from subulp.storage.bf16 import BF16
from subulp.storage.codec import Codec
from subulp.storage.e4m3 import E4M3
from subulp.storage.e5m2 import E5M2
from subulp.storage.fp16 import FP16
from tests.bits import bits, same_bits

ALL_DRAWS_16 = torch.arange(1 << 16, dtype=torch.int32)
WIDE = [FP16, E4M3, E5M2]
FORMATS = {dtype: codec for dtype, codec in CODECS.items() if codec.draw_bits}


def stored(x: torch.Tensor, fmt: Codec, code: Word) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=fmt.dtype)
    store(result, code)
    return result


def encode(x: torch.Tensor, fmt: Codec, draw: torch.Tensor | int) -> torch.Tensor:
    draws = torch.as_tensor(draw, dtype=torch.int64).expand(x.shape)
    words = Word(torch.where(draws >= 1 << 31, draws - (1 << 32), draws).to(torch.int32))
    quiet = fmt.quiet(x) if fmt.quiet is not None else x
    return stored(x, fmt, fmt.encode(quiet, words))


def encode_nearest(x: torch.Tensor, fmt: Codec) -> torch.Tensor:
    return stored(x, fmt, fmt.nearest(x))


def from_bits(*patterns: int) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32).copy())


def every_value(fmt: Codec) -> torch.Tensor:
    codes = torch.arange(1 << (8 * fmt.dtype.itemsize))
    return codes.to(torch.int16 if fmt.dtype.itemsize == 2 else torch.uint8).view(fmt.dtype)


def values_in_every_binade() -> torch.Tensor:
    """Both signs of three fp32 values with random low bits in every bf16 binade, and subnormals of bf16 and of fp32."""
    generator = np.random.default_rng(0)
    exponents = np.repeat(np.arange(0, 255, dtype=np.uint32), 3)
    mantissas = generator.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    small = np.array([1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x18001, 0x7FFFFF], dtype=np.uint32)
    patterns = np.concatenate([(exponents << 23) | mantissas, small])
    patterns = patterns[patterns < 0x7F7F0000]
    return torch.from_numpy(np.concatenate([patterns, patterns | 0x80000000]).view(np.float32).copy())


def test_bf16_is_exactly_unbiased_over_all_draws():
    """The mean over all 65,536 draws is the value itself: P(up) = t / 2**16 for the dropped field t, with no error.

    The two candidates are neighbours in bf16, so the sum of the results' offsets (in units of 2**-16 ulp) must equal the
    dropped field times 65,536 exactly; integer arithmetic, no tolerance.
    """
    for x in values_in_every_binade():
        results = bits(encode(x.expand(1 << 16), BF16, ALL_DRAWS_16)).to(torch.int64) & 0xFFFF
        pattern = int(bits(x)) & 0xFFFFFFFF
        low = pattern >> 16
        ups = results - low
        assert ups.min() >= 0
        assert ups.max() <= 1
        assert int(ups.sum()) == pattern & 0xFFFF


def test_bf16_neighbours_are_the_two_nearest_grid_points():
    for x in values_in_every_binade()[::7]:
        results = encode(x.expand(1 << 16), BF16, ALL_DRAWS_16).double().unique()
        gap = float(results.max() - results.min())
        assert results.numel() <= 2
        assert float(results.min()) <= float(x) <= float(results.max())
        exponent = max(math.frexp(abs(float(x)))[1] - 1, -126) if float(x) else -126
        assert gap in (0.0, 2.0 ** (exponent - 7))


@pytest.mark.parametrize("fmt", WIDE, ids=lambda f: str(f.dtype))
def test_wide_formats_round_up_with_the_right_probability(fmt):
    """P(up) is read off exactly: the carry form rounds up for precisely the draws >= 2**32 - fraction.

    So the draw 2**32 - f must go up and 2**32 - f - 1 must not, where f / 2**32 is the exact fraction (a dyadic number
    with at most 32 bits for values of at least one subnormal step / 256).
    """
    grid = every_value(fmt).float()
    grid = grid[torch.isfinite(grid) & (grid >= 0)].unique()
    generator = torch.Generator().manual_seed(0)
    for low, high in [
        (float(grid[i]), float(grid[i + 1])) for i in torch.randperm(len(grid) - 1, generator=generator)[:200]
    ]:
        fraction = float(torch.rand((), generator=generator)) + 2**-8
        x = torch.tensor(low + (high - low) * min(fraction, 0.999))
        f = (float(x) - low) / (high - low) * 2**32
        assert f == int(f)
        for sign in (1, -1):
            assert float(encode(sign * x, fmt, 2**32 - int(f)).float()) == sign * high
            assert float(encode(sign * x, fmt, 2**32 - int(f) - 1).float()) == sign * low


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: str(f.dtype))
@pytest.mark.parametrize("stochastic", [True, False])
def test_every_representable_value_is_a_fixed_point(fmt, stochastic):
    values = every_value(fmt)
    nan = values.float().isnan()
    for draw in (0, 1, 0x8000, 0xFFFF, *((0x80000000, 0xFFFFFFFF) if fmt in WIDE else ())):
        result = encode(values.float(), fmt, draw) if stochastic else encode_nearest(values.float(), fmt)
        assert same_bits(result[~nan], values[~nan])
        assert result[nan].float().isnan().all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: str(f.dtype))
def test_nan_of_every_kind_stays_nan_with_its_sign(fmt):
    patterns = [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF, 0x7F810000, 0x7FFF0001]
    x = from_bits(*patterns, *(p | 0x80000000 for p in patterns))
    for draw in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        for result in (encode(x, fmt, draw), encode_nearest(x, fmt)):
            assert result.float().isnan().all()
            sign = bits(result) < 0 if result.element_size() == 2 else bits(result) >= 0x80
            assert sign.tolist() == [False] * len(patterns) + [True] * len(patterns)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: str(f.dtype))
def test_infinities_stay_and_finite_values_stay_finite(fmt):
    largest = float(torch.finfo(fmt.dtype).max)
    infinity = torch.tensor([math.inf, -math.inf])
    finite = torch.tensor([largest, largest * 1.0001, 3.3895313e38, 3.4028235e38, largest * 1.5])
    finite = finite[finite.isfinite()]
    for draw in (0, 1, 0xFFFF, *((0xFFFFFFFF,) if fmt in WIDE else ())):
        kept = encode(infinity, fmt, draw).float()
        assert kept.isnan().all() if fmt is E4M3 else torch.equal(kept, infinity)
        for sign in (1, -1):
            assert torch.equal(encode(sign * finite, fmt, draw).float(), torch.full_like(finite, sign * largest))


def test_every_carry_into_infinity_saturates():
    """The 65,535 fp32 values between bf16's largest and fp32's largest, with the draw that would carry."""
    x = torch.from_numpy(np.arange(0x7F7F0000, 0x7F800000, dtype=np.uint32).view(np.float32).copy())
    for draw in (0, 1, 0xFFFF):
        assert (bits(encode(x, BF16, draw)) == 0x7F7F).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: str(f.dtype))
def test_zeros_keep_their_signs(fmt):
    zeros = torch.tensor([0.0, -0.0])
    for draw in (0, 0xFFFF):
        assert encode(zeros, fmt, draw).float().signbit().tolist() == [False, True]


def test_nearest_bf16_is_torchs_for_every_number():
    """Ties, subnormals and overflow alike, over one value in 9,973 of all fp32 patterns."""
    patterns = np.arange(0, 1 << 32, 9973, dtype=np.int64).astype(np.uint32)
    ties = (np.arange(0, 1 << 16, dtype=np.int64).astype(np.uint32) << 16) | 0x8000
    x = torch.from_numpy(np.concatenate([patterns, ties]).view(np.float32).copy())
    x = x[~x.isnan()]
    assert same_bits(encode_nearest(x, BF16), x.to(torch.bfloat16))


@pytest.mark.parametrize("fmt", WIDE, ids=lambda f: str(f.dtype))
def test_wide_subnormals_are_unbiased_in_the_mean(fmt):
    """Values below the smallest step s become s with probability x / s: binomial, z < 5.5 (P = 3.8e-8) for each."""
    n = 1 << 16
    step = float(every_value(fmt)[1].float())
    generator = torch.Generator().manual_seed(1)
    draws = torch.randint(0, 1 << 32, (n,), generator=generator)
    for share in (0.5, 0.1, 0.003, 2**-9):
        x = torch.full((n,), step * share)
        ups = int((encode(x, fmt, draws).float() > 0).sum())
        assert abs(ups - n * share) / math.sqrt(n * share * (1 - share)) < 5.5


@pytest.mark.parametrize("fmt", CODECS.values(), ids=lambda f: str(f.dtype))
def test_decoding_is_torchs_for_every_code(fmt):
    values = every_value(fmt) if fmt.bits < 32 else from_bits(*range(0, 1 << 32, 9973))
    decoded, expected = fmt.decode(load(values)), values.float()
    numbers = ~expected.isnan()
    assert same_bits(decoded[numbers], expected[numbers])
    assert torch.equal(decoded.isnan(), ~numbers)
    assert torch.equal(decoded.signbit(), expected.signbit())


@pytest.mark.parametrize("fmt", [FP16, E5M2], ids=lambda f: str(f.dtype))
def test_nearest_is_torchs_for_every_number(fmt):
    x = from_bits(*range(0, 1 << 32, 9973))
    ties = (every_value(fmt).float()[:-1] + every_value(fmt).float()[1:]) / 2
    x = torch.cat([x, ties])
    x = x[~x.isnan()]
    assert same_bits(encode_nearest(x, fmt), x.to(fmt.dtype))


def test_nearest_e4m3_saturates():
    """torch versions differ in what becomes of numbers beyond the largest one; here finite stays finite."""
    x = from_bits(*range(0, 1 << 32, 9973))
    x = x[x.isfinite()]
    assert same_bits(encode_nearest(x, E4M3), x.clamp(-448.0, 448.0).to(E4M3.dtype))
