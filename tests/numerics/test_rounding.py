"""The public rounding functions: semantics of their torch counterparts, unbiased, independent of layout, clear errors."""

import math

import pytest
import torch

import subulp
from tests.bits import same_bits

TARGETS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
OPERATIONS = ["copy", "add", "addcdiv", "lerp"]


def apply(name: str, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **key) -> torch.Tensor:
    match name:
        case "copy":
            return subulp.copy_stochastic_(target, a, **key)
        case "add":
            return subulp.add_stochastic_(target, a, alpha=0.3, **key)
        case "addcdiv":
            return subulp.addcdiv_stochastic_(target, a, b, value=0.3, **key)
        case _:
            return subulp.lerp_stochastic_(target, a, 0.3, **key)


def exact(name: str, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    target, a, b = target.double(), a.double(), b.double()
    match name:
        case "copy":
            return a
        case "add":
            return torch.add(target, a, alpha=0.3)
        case "addcdiv":
            return torch.addcdiv(target, a, b, value=0.3)
        case _:
            return torch.lerp(target, a, 0.3)


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=pytest.mark.slow if t == torch.float16 else ()) for t in TARGETS], ids=str
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_mean_is_torchs_exact_result(name, dtype):
    """n roundings of one value v between neighbours a gap apart: the mean has standard error <= gap / (2 sqrt(n))."""
    n = 1 << 16
    start, a, b = (torch.tensor(v).to(dtype) for v in (1.2, 2.3, 0.7))
    target = start.expand(n).clone()
    result = apply(name, target, a.float().expand(n), b.float().expand(n), seed=1)
    assert result is target
    expected = float(exact(name, start, a, b))
    gap = float(result.double().max() - result.double().min())
    assert gap <= 2.0 ** (math.frexp(expected)[1] - 1) * {1: 2**-2, 2: 2**-7}[dtype.itemsize]
    assert abs(float(result.double().mean()) - expected) < 5.5 * gap / (2 * math.sqrt(n)) + 1e-6


def test_scale_belongs_to_the_other_operand():
    """Helpers in the wild compute other + alpha * input: 4.5 here."""
    one, four = torch.ones(3), torch.full((3,), 4.0)
    assert subulp.add_stochastic_(one.clone(), four, alpha=0.5, seed=0).tolist() == [3.0] * 3
    assert subulp.add_stochastic_(one.bfloat16(), 4.0, alpha=0.5, seed=0).tolist() == [3.0] * 3
    assert subulp.addcdiv_stochastic_(one.clone(), four, 2 * one, value=0.5, seed=0).tolist() == [2.0] * 3
    assert subulp.lerp_stochastic_(one.bfloat16(), four, 0.5, seed=0).tolist() == [2.5] * 3


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_rounding_is_unbiased_for_random_values(dtype):
    """Sum of standardised errors over many values: each error has mean 0 and variance f (1 - f) gap**2."""
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    error = subulp.round_stochastic(x, dtype, seed=5).double() - x.double()
    assert abs(float(error.sum())) < 5.5 * float((error**2).sum().sqrt())
    assert float((error != 0).double().mean()) > 0.9


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(t, marks=pytest.mark.slow if t == torch.float16 else ()) for t in TARGETS), torch.float32],
    ids=str,
)
def test_bits_do_not_depend_on_memory_layout(name, dtype):
    generator = torch.Generator().manual_seed(3)
    start, a, b = (torch.rand(4, 6, 5, 8, generator=generator) + 0.5 for _ in range(3))
    start = start.to(dtype)
    expected = apply(name, start.clone(), a, b, seed=9, stream=4, step=2)
    layouts = {
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "transposed": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
        "offset": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
    }
    for layout in layouts.values():
        target = layout(start)
        apply(name, target, layout(a), b, seed=9, stream=4, step=2)
        assert same_bits(target, expected)


def test_a_piece_with_its_offset_gives_the_bits_of_the_whole():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = subulp.round_stochastic(x, torch.bfloat16, seed=1, stream=2, step=3)
    for start in (1, 2, 333):
        piece = subulp.round_stochastic(x[start:], torch.bfloat16, seed=1, stream=2, step=3, offset=start)
        assert same_bits(piece, whole[start:])


def test_neighbours_of_a_slice_are_untouched():
    base = torch.zeros(6, 8, dtype=torch.bfloat16)
    subulp.copy_stochastic_(base[:, ::2], torch.full((6, 4), 1.001), seed=3)
    assert (base[:, ::2] >= 1).all()
    assert (base[:, 1::2] == 0).all()


def test_seed_stream_and_step_give_other_bits_and_equal_ones_equal_bits():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    key = {"seed": 1, "stream": 1, "step": 1}
    first = subulp.round_stochastic(x, torch.bfloat16, **key)
    assert same_bits(first, subulp.round_stochastic(x, torch.bfloat16, **key))
    for name in key:
        other = subulp.round_stochastic(x, torch.bfloat16, **{**key, name: 2})
        assert 1000 < int((first != other).sum()) < 2000  # 1/3 of 4096 expected for uniform fractions


def test_global_generator_is_untouched():
    before = torch.get_rng_state()
    subulp.round_stochastic(torch.randn(10, generator=torch.Generator()), torch.bfloat16, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_of_other_kinds():
    assert subulp.round_stochastic(torch.zeros(0, 3), torch.bfloat16, seed=0).shape == (0, 3)
    assert subulp.round_stochastic(torch.tensor(1.5), torch.bfloat16, seed=0).shape == ()
    x = torch.randn(3, requires_grad=True, generator=torch.Generator())
    assert not subulp.round_stochastic(x, torch.bfloat16, seed=0).requires_grad
    assert same_bits(subulp.round_stochastic(x, torch.float32, seed=0), x.detach())
    z = torch.full((4096,), 1.001 + 2.001j)
    assert same_bits(subulp.copy_stochastic_(torch.zeros_like(z), z, seed=0), z)
    broadcast = subulp.add_stochastic_(torch.zeros(2, 3), torch.arange(3.0), seed=0)
    assert broadcast.tolist() == [[0, 1, 2]] * 2
    double = torch.full((1 << 16,), 1.001, dtype=torch.float64)
    mean = subulp.round_stochastic(double, torch.bfloat16, seed=0).double().mean()
    assert abs(float(mean) - 1.001) < 5.5 * 2**-8 / 2**8


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: subulp.round_stochastic(x, torch.int8, seed=0), ValueError, r"torch\.int8.*bfloat16"),
        (lambda x: subulp.round_stochastic(x, torch.bfloat16, seed=-1), ValueError, r"seed=-1.*\[0, 2\*\*64\)"),
        (lambda x: subulp.round_stochastic(x, torch.bfloat16, seed=0.5), TypeError, r"seed=0\.5 is a float"),
        (lambda x: subulp.round_stochastic(x, torch.bfloat16, seed=True), TypeError, "seed=True is a bool"),
        (lambda x: subulp.round_stochastic(x, torch.bfloat16, seed=0, step=2**32), ValueError, "step=4294967296"),
        (lambda x: subulp.round_stochastic(x.long(), torch.bfloat16, seed=0), TypeError, r"torch\.int64"),
        (lambda x: subulp.copy_stochastic_(x.long(), x, seed=0), TypeError, r"torch\.int64"),
        (lambda x: subulp.copy_stochastic_(x, torch.zeros(7), seed=0), ValueError, r"\(7,\).*\(5,\)"),
        (lambda x: subulp.add_stochastic_(x, x, alpha="2", seed=0), TypeError, "alpha='2'"),
        (lambda x: subulp.addcdiv_stochastic_(x.cfloat(), x.cfloat(), x.cfloat(), seed=0), TypeError, "addcdiv"),
        (lambda x: subulp.copy_stochastic_(x, x.cfloat(), seed=0), TypeError, "view_as_real"),
    ],
)
def test_misuse_is_explained_and_changes_nothing(call, error, match):
    x = torch.ones(5)
    with pytest.raises(error, match=match):
        call(x)
    assert (x == 1).all()
