"""What a user changes between steps takes effect, or is refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import make_params, set_grads, train
from tests.specs import SPECS, first_fast

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


@all_optimizers
@pytest.mark.parametrize("form", ["fp32", {"exp_avg": "fp32"}], ids=str)
def test_an_edited_state_dtype_holds_from_the_next_step(spec, form):
    params = make_params(((5, 6), (300,)))
    opt = spec.make(params)
    train(opt, params, 2)
    states = [s.name for s in opt.rule(opt.param_groups[0]).states]
    if isinstance(form, dict):
        form = dict.fromkeys(states[:1], "fp32")
    before = {name: opt.state[params[1]][name].clone() for name in states if name in opt.state[params[1]]}
    opt.param_groups[0]["state_dtype"] = form
    opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] and 0.0
    set_grads(params, 5)
    opt.step()
    for name in before:
        expected = torch.float32 if form == "fp32" or name in form else before[name].dtype
        assert opt.state[params[1]][name].dtype == expected
    opt.param_groups[0]["state_dtype"] = "param"
    opt.step()
    assert all(opt.state[params[1]][name].dtype == t.dtype for name, t in before.items())


def test_widening_a_state_changes_no_value_of_it():
    params, others = make_params(((40,),)), make_params(((40,),))
    opt, other = (subulp.AdamW(ps, stream=0) for ps in (params, others))
    train(opt, params, 3)
    train(other, others, 3)
    kept = opt.state[params[0]]["exp_avg_sq"].clone()
    opt.param_groups[0]["state_dtype"] = "fp32"
    wide = subulp.AdamW(others, state_dtype="fp32", stream=0)
    saved = other.state_dict()
    saved["param_groups"][0]["state_dtype"] = "fp32"
    wide.load_state_dict(saved)
    train(opt, params, 1, start=3)
    train(wide, others, 1, start=3)
    assert same_bits(params[0].detach(), others[0].detach())
    assert not torch.equal(opt.state[params[0]]["exp_avg_sq"], kept.float())


@all_optimizers
def test_a_gradient_of_another_shape_with_as_many_elements_is_refused(spec):
    params = make_params(((4, 6), (8,)))
    opt = spec.make(params)
    for _ in range(2):  # before there is a plan, and when there is one
        set_grads(params, 0)
        before = [p.detach().clone() for p in params]
        params[0].grad.data = params[0].grad.reshape(6, 4)
        with pytest.raises((ValueError, RuntimeError), match=r"\(6, 4\)"):
            opt.step()
        assert all(same_bits(p.detach(), q) for p, q in zip(params, before, strict=True))
        train(opt, params, 2)


@all_optimizers
def test_a_step_on_the_meta_device_makes_states_and_counts(spec):
    """For shapes and memory without a machine that holds them; torch's optimizers do it too."""
    params = [Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in ((5, 6), (7,))]
    if spec.cls is subulp.Prodigy:
        pytest.skip("Prodigy's estimate needs values")
    opt = spec.make(params)
    for p in params:
        p.grad = torch.empty_like(p)
    opt.step()
    for p in params:
        assert float(opt.state[p]["step"]) == 1
        assert all(opt.state[p][s.name].is_meta for s in opt.states(opt.param_groups[0], p))


@first_fast(SPECS)
@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_each_tensor_is_rounded_as_asked(spec, backend):
    """One tensor at nearest: its bits are those of rounding its exact value to nearest, and the others' are as before."""
    if backend == "numba":
        pytest.importorskip("numba")
    shape = ((64, 130),)
    names = [
        "param",
        *(s.name for s in spec.make(make_params(shape)).rule({**spec.make(make_params(shape)).param_groups[0]}).states),
    ]

    def run(rounding):
        params = make_params(shape)
        opt = spec.make(params, stochastic_rounding=rounding, backend=backend)
        set_grads(params, 3)
        opt.step()
        return {"param": params[0].detach(), **{n: opt.state[params[0]][n] for n in names[1:]}}

    drawn, nearest = run(True), run(False)
    for name in names:
        mixed = run({name: False})
        for other in names:
            assert same_bits(mixed[other], (nearest if other == name else drawn)[other])
        written = run(f"{name}:false")
        assert all(map(same_bits, written.values(), mixed.values()))
    assert all(map(same_bits, run(dict.fromkeys(names, False)).values(), nearest.values()))
    assert all(map(same_bits, run(dict.fromkeys(names, True)).values(), drawn.values()))


def test_rounding_by_tensor_survives_a_checkpoint_and_is_checked():
    p = Parameter(torch.ones(3).bfloat16())
    opt = subulp.AdamW([p], stochastic_rounding={"exp_avg": False})
    assert opt.param_groups[0]["stochastic_rounding"] == "exp_avg:False"
    other = subulp.AdamW([p])
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["stochastic_rounding"] == "exp_avg:False"
    with pytest.raises(ValueError, match=r"'exp_average'.*param, exp_avg, exp_avg_sq"):
        subulp.AdamW([p], stochastic_rounding={"exp_average": False})
    with pytest.raises(TypeError, match=r"\['param'\]='no'"):
        subulp.AdamW([p], stochastic_rounding="param:no")
