"""Statistical tests of the noise. Seeds are fixed, so a test passes or fails for good.

Thresholds: for independent uniform draws every z below is standard normal to good approximation, and
P(|z| > 5.5) = 3.8e-8. About 6,000 such z are looked at, so an ideal generator would fail this file with probability
2.3e-4. Lag searches look at 65,536 z each and use 7.0, P = 2.6e-12: 40 of them fail with probability 7e-6.
"""

import numpy as np
import pytest
import torch

from tests.numerics.noises import narrow_draw, noise_word, wide_draw
from tests.specs import others_slow

LIMIT = 5.5
LAG_LIMIT = 7.0
N = 1 << 18


def words(count=N, start=0, seed=11, stream=7, step=1, word=0):
    counter = torch.arange(start, start + count)
    return noise_word(counter, seed, stream, step, word).numpy()


def halves(**kwargs):
    w = words(**kwargs)
    return (w & 0xFFFF).astype(np.float64), (w >> 16).astype(np.float64)


def centred(x):
    """Uniform 16-bit values scaled to mean 0 and variance 1."""
    return (x - 32767.5) / np.sqrt((65536.0**2 - 1) / 12)


def correlation_z(a, b):
    """sqrt(n) times the correlation of two independent standardised samples is standard normal."""
    return abs((centred(a) * centred(b)).sum()) / np.sqrt(len(a))


STREAMS = [
    {},
    {"step": 2},
    {"step": 1000},
    {"seed": 12},
    {"seed": 11 + 2**32},
    {"stream": 8},
    {"stream": 0},
    {"word": 1},
    {"word": 2},
    {"word": 128},
    {"start": 2**32},
]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_every_bit_is_fair(stream):
    w = words(**stream)
    ones = np.array([((w >> b) & 1).sum() for b in range(32)])
    assert np.abs((ones - N / 2) / np.sqrt(N / 4)).max() < LIMIT


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_16_bit_values_are_uniform(stream):
    """Chi-square over 65,536 cells: (chi2 - df) / sqrt(2 df) is standard normal for large df."""
    for half in halves(count=1 << 20, **stream):
        counts = np.bincount(half.astype(np.int64), minlength=65536)
        expected = len(half) / 65536
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi2 - 65535) / np.sqrt(2 * 65535) < LIMIT


def test_no_correlation_between_halves_neighbours_and_rows():
    low, high = halves()
    assert correlation_z(low, high) < LIMIT
    for lag in [*range(1, 65), 100, 128, 256, 512, 768, 1000, 1024, 2048, 3072, 4096, 8192, 16384, 65536]:
        for a in (low, high):
            for b in (low, high):
                assert correlation_z(a[:-lag], b[lag:]) < LIMIT, lag


@pytest.mark.parametrize("other", STREAMS[1:], ids=str)
def test_no_correlation_between_streams(other):
    for a in halves():
        for b in halves(**other):
            assert correlation_z(a, b) < LIMIT


@pytest.mark.parametrize("other", others_slow([{"start": 1}, {"start": 64}, *STREAMS[1:8]]), ids=str)
def test_no_pair_of_bits_is_correlated(other):
    """Every bit of a stream against every bit of another: 1024 z a pair of streams."""
    a, b = words(), words(**other)
    bits_a = np.stack([((a >> k) & 1) * 2.0 - 1 for k in range(32)]).astype(np.float32)
    bits_b = np.stack([((b >> k) & 1) * 2.0 - 1 for k in range(32)]).astype(np.float32)
    z = np.abs(bits_a @ bits_b.T) / np.sqrt(N)
    assert z.max() < LIMIT + 0.5  # 9 * 1024 z at 6.0: P = 1.8e-5


def test_no_stream_is_a_shifted_copy_of_another():
    """Circular cross-correlation at all 65,536 lags, over steps, streams, seeds and slots."""
    n = 1 << 16
    reference = [np.fft.rfft(centred(h)) for h in halves(count=n)]
    others = [{"step": s} for s in range(2, 10)] + [{"stream": s} for s in range(8, 14)]
    others += [{"seed": 12}, {"word": 1}, {"word": 2}, {"start": 1 << 20}]
    for other in others:
        spectrum = np.fft.rfft(centred(halves(count=n, **other)[0]))
        for r in reference:
            lags = np.fft.irfft(np.conj(r) * spectrum, n) / np.sqrt(n)
            assert np.abs(lags).max() < LAG_LIMIT, other


def test_collisions_between_streams_are_rare():
    """Equal words at equal counters of two streams: Poisson with mean n / 2**32 = 6.1e-5 each, 40 streams."""
    reference = words()
    equal = sum(int((words(step=s) == reference).sum()) for s in range(2, 42))
    assert equal <= 3  # P(Poisson(0.0024) > 3) = 1.5e-12


def test_wide_draws_are_uniform_in_every_byte():
    draws = wide_draw(torch.arange(N), 11, 7, 1, 0).numpy()
    for shift in (0, 8, 16, 24):
        counts = np.bincount((draws >> shift) & 0xFF, minlength=256)
        chi2 = ((counts - N / 256) ** 2 / (N / 256)).sum()
        assert abs(chi2 - 255) / np.sqrt(2 * 255) < LIMIT + 1  # chi2 with 255 df has a heavier upper tail


@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_sums_at_one_element_over_10000_steps_vary_like_independent_draws(slot):
    """The rounding error of an element is its draw's; over T steps its sum must have variance T / 12 (in ulp**2).

    The sum of squares of n standardised sums is chi-square with n df; the lag-1 products have variance 1 each.
    """
    steps, n = 10_000, 2048
    index = torch.arange(n)
    total = torch.zeros(n, dtype=torch.float64)
    lagged = torch.zeros(n, dtype=torch.float64)
    previous = torch.zeros(n, dtype=torch.float64)
    scale = float(np.sqrt((65536.0**2 - 1) / 12))
    for step in range(1, steps + 1):
        draw = (narrow_draw(index, 3, 5, step, slot).double() - 32767.5) / scale
        total += draw
        lagged += draw * previous
        previous = draw
    z = (total / np.sqrt(steps)).numpy()
    assert abs((z**2).sum() - n) / np.sqrt(2 * n) < LIMIT
    assert abs(z.sum()) / np.sqrt(n) < LIMIT
    products = (lagged / np.sqrt(steps - 1)).numpy()
    assert abs((products**2).sum() - n) / np.sqrt(2 * n) < LIMIT
    assert np.abs(np.corrcoef(z[:-1], z[1:])[0, 1]) * np.sqrt(n) < LIMIT
