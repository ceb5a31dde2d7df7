"""EMA: it moves in bf16, has the bits of its arguments alone, and OneTrainer's methods."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

import subulp
from subulp.numerics.streams import stream_of_name
from tests.bits import same_bits
from tests.models import make_params


def moved(params: list[Parameter], by: float) -> None:
    with torch.no_grad():
        for p in params:
            p.add_(by)


def test_bf16_follows_fp32_at_decay_0_9999():
    """An average of 1.0 towards 1.1: each update is 1e-5, a thousandth of an ulp of 2**-7, and nearest never moves."""
    count, steps = 4096, 2000
    ones, target = Parameter(torch.ones(count, dtype=torch.bfloat16)), Parameter(torch.full((count,), 1.1))
    ema = subulp.EMA([ones], decay=0.9999)
    for step in range(steps):
        ema.step([target], 10**6 + step)
    exact = 1 + (float(target.detach()[0]) - 1) * (1 - 0.9999**steps)
    value = ema.ema_parameters[0].double()
    # A rounding has variance q (1 - q) ulp**2 with q = 1e-5 / 2**-7 = 0.0013: 2000 of them sd 1.6 ulp = 0.0125 an element at
    # most. Four standard errors of the mean: false alarm 6e-5.
    assert abs(float(value.mean()) - exact) < 4 * math.sqrt(steps * 0.0013) * 2.0**-7 / math.sqrt(count)
    assert exact - 1 > 0.018


def test_bits_are_a_function_of_seed_name_and_step():
    def run(names, order, seed=0):
        params = make_params()
        named = [(names[i], params[i]) for i in order]
        ema = subulp.EMA(named, decay=0.9, seed=seed)
        for step in range(5):
            moved(params, 0.013)
            ema.step(named, step + 50)
        return {name: e for (name, _), e in zip(named, ema.ema_parameters, strict=True)}

    names = [f"layer{i}" for i in range(6)]
    first = run(names, range(6))
    torch.manual_seed(99)
    again = run(names, [3, 1, 0, 2, 5, 4])
    other = run(names, range(6), seed=1)
    assert all(same_bits(first[n], again[n]) for n in names)
    assert not all(same_bits(first[n], other[n]) for n in names)


def test_noise_is_that_of_the_name_apart_from_the_optimizers():
    def averaged(*others: tuple[str, Parameter]) -> torch.Tensor:
        p = Parameter(torch.linspace(0.5, 1, 4096).bfloat16())
        ema = subulp.EMA([*others, ("w", p)], decay=0.9)
        moved([p], 0.013)
        ema.step([*others, ("w", p)], 1000)
        return ema.ema_parameters[-1]

    start = torch.linspace(0.5, 1, 4096).bfloat16()
    end = Parameter(start.clone())
    moved([end], 0.013)
    weight = 1.0 - 0.9
    names = {name: stream_of_name(name) for name in ("w", "ema.w")}
    by_hand = {
        name: subulp.lerp_stochastic_(start.clone(), end.detach(), weight, seed=0, stream=stream, step=1000)
        for name, stream in names.items()
    }
    assert same_bits(averaged(), by_hand["ema.w"])
    assert not same_bits(averaged(), by_hand["w"])  # the stream with which an optimizer rounds the weight
    assert same_bits(averaged(("frozen", Parameter(torch.ones(3), requires_grad=False))), by_hand["ema.w"])


def test_fp32_averages_of_bf16_weights_are_the_formula():
    params = make_params()
    ema = subulp.EMA(params, decay=0.5, dtype=torch.float32)
    expected = [p.detach().float() for p in params]
    for step in range(20, 25):
        moved(params, 0.1)
        ema.step(params, step)
        for e, p in zip(expected, params, strict=True):
            e.copy_(e + torch.tensor(0.5) * (p.detach().float() - e))
    assert all(torch.equal(a, b) for a, b in zip(ema.ema_parameters, expected, strict=True))


def test_decay_warms_up_and_steps_are_skipped():
    p = Parameter(torch.zeros(3))
    ema = subulp.EMA([p], decay=0.99, update_step_interval=5)
    assert ema.get_current_decay(0) == 0.1
    assert ema.get_current_decay(10**6) == 0.99
    moved([p], 1.0)
    ema.step([p], 3)
    assert float(ema.ema_parameters[0][0]) == 0.0
    ema.step([p], 4)
    assert float(ema.ema_parameters[0][0]) == pytest.approx(1 - 5 / 14)


def test_weights_are_lent_and_returned():
    params = make_params()
    ema = subulp.EMA(params, decay=0.5, stream=0)
    original = [e.clone() for e in ema.ema_parameters]
    moved(params, 1.0)
    trained = [p.detach().clone() for p in params]
    ema.copy_ema_to(params)
    assert all(same_bits(p.detach(), e) for p, e in zip(params, original, strict=True))
    ema.copy_temp_to(params)
    assert all(same_bits(p.detach(), q) for p, q in zip(params, trained, strict=True))
    with pytest.raises(RuntimeError, match="store_temp=True"):
        ema.copy_temp_to(params)
    ema.copy_ema_to(params, store_temp=False)
    with pytest.raises(RuntimeError, match="store_temp=True"):
        ema.copy_temp_to(params)


def test_frozen_and_strided_parameters():
    frozen = Parameter(torch.ones(4), requires_grad=False)
    wide = Parameter(torch.ones(6, 8, dtype=torch.bfloat16))
    plain = Parameter(torch.ones(8, 6, dtype=torch.bfloat16))
    wide.data = wide.data.t()
    emas = [subulp.EMA([frozen, p], decay=0.5, stream=0) for p in (wide, plain)]
    for p in (wide, plain):
        p.data.copy_(torch.linspace(0, 1, 48).view(8, 6))
    frozen.data.fill_(7)
    for ema, p in zip(emas, (wide, plain), strict=True):
        ema.step([frozen, p], 100)
    assert torch.equal(emas[0].ema_parameters[0], torch.ones(4))
    assert same_bits(emas[0].ema_parameters[1].contiguous(), emas[1].ema_parameters[1])


def test_it_resumes_bit_for_bit(tmp_path):
    params = make_params()
    ema = subulp.EMA(params, decay=0.9)
    for step in range(3):
        moved(params, 0.1)
        ema.step(params, step)
    torch.save(ema.state_dict(), tmp_path / "ema.pt")
    other = subulp.EMA(make_params(seed=5), decay=0.9)
    other.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    for step in range(3, 6):
        moved(params, 0.1)
        ema.step(params, step)
        other.step(params, step)
    assert all(map(same_bits, ema.ema_parameters, other.ema_parameters))
    ema.to(dtype=torch.float32)
    assert all(e.dtype == torch.float32 for e in ema.ema_parameters)


def test_a_changed_decay_holds_after_a_resume():
    """OneTrainer makes the wrapper with the setting of today and loads the backup's averages into it."""
    params = make_params()
    old, new, fresh = (subulp.EMA(params, decay=d, dtype=torch.float32) for d in (0.9, 0.5, 0.5))
    new.load_state_dict(old.state_dict())
    assert (new.decay, new.state_dict()["decay"]) == (0.5, 0.5)
    moved(params, 0.1)
    new.step(params, 100)
    fresh.step(params, 100)
    assert all(map(same_bits, new.ema_parameters, fresh.ema_parameters))


def test_weights_are_put_aside_where_asked():
    params = make_params()
    ema = subulp.EMA(params, temp_device="meta")
    ema.copy_ema_to(params)
    assert all(t.is_meta for t in ema._temp)
    ema = subulp.EMA(params, decay=0.5, temp_device="cpu")
    moved(params, 0.5)
    before = [p.detach().clone() for p in params]
    ema.copy_ema_to(params)
    assert not same_bits(params[0].detach(), before[0])
    ema.copy_temp_to(params)
    assert all(same_bits(p.detach(), q) for p, q in zip(params, before, strict=True))


def test_a_module_is_its_named_parameters():
    net = torch.nn.Sequential(torch.nn.Linear(40, 30)).bfloat16()
    emas = [subulp.EMA(given, decay=0.9) for given in (net, net.named_parameters())]
    moved(list(net.parameters()), 0.013)
    for ema, given in zip(emas, (net, net.parameters()), strict=True):
        ema.step(given, 50)
    assert all(map(same_bits, emas[0].ema_parameters, emas[1].ema_parameters))
    for wrong, shown in ((net[0].weight, "Parameter"), ("weights", "str"), (3, "int"), ([net], "Sequential")):
        with pytest.raises(TypeError, match=rf"(got a|entry is).*{shown}.*(pass a module)?"):
            subulp.EMA(wrong)
        with pytest.raises(TypeError, match=rf"(got a|entry is).*{shown}"):
            subulp.GradientAccumulation(wrong, 2)


def test_misuse_is_told():
    params = make_params()
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        subulp.EMA(params, decay=1.0)
    with pytest.raises(ValueError, match="update_step_interval=0"):
        subulp.EMA(params, update_step_interval=0)
    ema = subulp.EMA(params)
    with pytest.raises(ValueError, match="5 parameters for 6 averages"):
        ema.step(params[1:], 0)
    with pytest.raises(ValueError, match=r"Parameter 0 has shape \(7,\)"):
        ema.step([params[1], params[0], *params[2:]], 0)
    with pytest.raises(TypeError, match=r"optimization_step=1\.5"):
        ema.step(params, 1.5)
    with pytest.raises(ValueError, match="averages"):
        ema.load_state_dict({"decay": 0.9, "ema_parameters": []})
