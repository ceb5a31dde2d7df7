"""Hyper-parameters and options: normal forms, per-group overrides, and errors that say value, rule and cure."""

import pytest
import torch
from torch.nn import Parameter

import subulp
from subulp.options import DEFAULTS
from tests.bits import same_bits
from tests.models import make_params, set_grads, train
from tests.specs import SPECS


def parameter() -> Parameter:
    return Parameter(torch.ones(3, dtype=torch.bfloat16))


BAD_OPTIONS = [
    ({"lr": -1.0}, ValueError, r"lr=-1\.0.*>= 0"),
    ({"lr": float("nan")}, ValueError, r"lr=nan"),
    ({"lr": float("inf")}, ValueError, r"lr=inf"),
    ({"lr": "1e-4"}, TypeError, r"lr='1e-4' is a str.*number"),
    ({"lr": True}, TypeError, r"lr=True is a bool"),
    ({"lr": torch.ones(2)}, ValueError, r"lr is a tensor of shape \(2,\).*one-element"),
    ({"weight_decay": -0.1}, ValueError, r"weight_decay=-0\.1"),
    ({"stochastic_rounding": "yes"}, TypeError, r"stochastic_rounding='yes'.*True or False"),
    ({"maximize": None}, TypeError, r"maximize=None"),
    ({"seed": -1}, ValueError, r"seed=-1.*\[0, 2\*\*64\)"),
    ({"seed": 2**64}, ValueError, r"seed=18446744073709551616"),
    ({"seed": 0.0}, TypeError, r"seed=0\.0 is a float"),
    ({"backend": "cuda"}, ValueError, r"backend='cuda'.*'auto', 'eager', 'numba', 'triton'"),
    ({"state_dtype": "fp8"}, ValueError, r"state_dtype='fp8'.*'param', 'fp32', 'bf16'"),
    ({"state_dtype": torch.float8_e4m3fn}, ValueError, r"float8_e4m3fn.*torch\.bfloat16"),
    ({"state_dtype": 16}, TypeError, r"state_dtype=16 is a int"),
    ({"state_dtype": {"exp_average": "bf16"}}, ValueError, r"'exp_average'"),
    ({"state_dtype": "int8"}, NotImplementedError, r"int8.*does not exist yet.*'bf16'"),
    ({"state_dtype": "factored"}, NotImplementedError, r"factored"),
    ({"weight_residual": "kahan"}, NotImplementedError, r"kahan.*does not exist yet"),
    ({"weight_residual": 8}, NotImplementedError, r"weight_residual=8"),
    ({"weight_residual": 4}, ValueError, r"weight_residual=4"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("options", "error", "match"), BAD_OPTIONS, ids=str)
def test_bad_options_are_explained(spec, options, error, match):
    with pytest.raises(error, match=match):
        spec.make([parameter()], **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1\.0.*\[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]=-0\.1"),
        ({"betas": (0.9,)}, ValueError, r"1 entries.*tuple of 2 numbers"),
        ({"betas": 0.9}, TypeError, r"betas=0\.9 is a float.*tuple of 2 numbers"),
        ({"betas": "(0.9, 0.99)"}, TypeError, r"is a str"),
        ({"eps": -1e-8}, ValueError, r"eps=-1e-08"),
    ],
    ids=str,
)
def test_bad_adam_options_are_explained(options, error, match):
    with pytest.raises(error, match=match):
        subulp.AdamW([parameter()], **options)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_unknown_keywords_name_the_nearest(spec):
    with pytest.raises(TypeError, match=rf"{spec.name}\(\).*'weight_decy'.*Did you mean 'weight_decay'"):
        spec.make([parameter()], weight_decy=0.1)
    with pytest.raises(TypeError, match=r"'state_dtyp'.*'state_dtype'"):
        spec.make([parameter()], state_dtyp="bf16")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bad_groups_are_named_and_not_added(spec):
    opt = spec.make([parameter()])
    with pytest.raises(ValueError, match=r"lr=-1\.0.*\(param group 1\)"):
        opt.add_param_group({"params": [parameter()], "lr": -1.0})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match=r"seed=-5.*\(param group 1\)"):
        spec.make([{"params": [parameter()]}, {"params": [parameter()], "seed": -5}])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_group_edited_to_nonsense_stops_the_step_before_anything_changes(spec):
    params = [parameter(), parameter()]
    opt = spec.make([{"params": params[:1]}, {"params": params[1:]}])
    train(opt, params, 2)
    before = [p.detach().clone() for p in params]
    opt.param_groups[1]["lr"] = -1.0
    set_grads(params, 3)
    with pytest.raises(ValueError, match=r"lr=-1\.0.*param group 1"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(float(opt.state[p]["step"]) == 2 for p in params)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    "form", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, {"*": "bf16"}, "param"], ids=str
)
def test_equal_state_dtypes_in_every_form(spec, form):
    states = [s.name for s in spec.make([parameter()]).rule(spec.make([parameter()]).param_groups[0]).states]
    form = dict.fromkeys(states, "bf16") if isinstance(form, dict) else form
    reference, params = make_params(), make_params()
    train(spec.make(reference), reference, 3)
    train(spec.make(params, state_dtype=form), params, 3)
    assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))


def test_state_dtypes():
    def dtypes(param_dtype, state_dtype):
        p = Parameter(torch.ones(3, dtype=param_dtype))
        opt = subulp.AdamW([p], state_dtype=state_dtype)
        opt.init_state()
        return tuple(opt.state[p][k].dtype for k in ("exp_avg", "exp_avg_sq"))

    b, h, f, d = torch.bfloat16, torch.float16, torch.float32, torch.float64
    assert dtypes(b, "param") == (b, b)
    assert dtypes(h, "param") == (h, b)  # fp16 squares underflow below gradients of 2.4e-4
    assert dtypes(f, "param") == (f, f)
    assert dtypes(d, "param") == (d, d)
    assert dtypes(b, "fp32") == (f, f)
    assert dtypes(f, torch.bfloat16) == (b, b)
    assert dtypes(b, {"exp_avg_sq": "fp32"}) == (b, f)
    assert dtypes(b, "exp_avg:fp32, exp_avg_sq:bf16") == (f, b)
    assert dtypes(h, {"exp_avg_sq": torch.float16}) == (h, h)
    assert dtypes(torch.complex64, "bf16") == (torch.complex64, torch.complex64)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_option_is_a_group_override(spec):
    overrides = {"maximize": True, "stochastic_rounding": False, "state_dtype": "fp32", "seed": 9, "backend": "eager"}
    both = make_params(((64,), (64,)))
    opt = spec.make([{"params": both[:1], **overrides}, {"params": both[1:]}])
    train(opt, both, 3)
    alone = make_params(((64,), (64,)))
    first = spec.make(alone, **overrides)
    train(first, alone, 3)
    assert same_bits(both[0], alone[0])
    alone = make_params(((64,), (64,)))
    train(spec.make(alone), alone, 3)
    assert same_bits(both[1], alone[1])
    assert set(DEFAULTS) <= set(opt.param_groups[0])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equal_values_in_other_types(spec):
    """YAML and TOML give ints and lists; trainers pass foreach and fused in any combination."""
    reference = make_params()
    train(spec.make(reference, lr=1.0, weight_decay=0.0), reference, 3)
    for options in (
        {"lr": 1, "weight_decay": 0},
        {"lr": torch.tensor(1.0), "weight_decay": 0.0},
        {"lr": torch.tensor([1.0]), "weight_decay": 0.0},
        {"lr": 1.0, "weight_decay": 0.0, "foreach": True, "fused": True},
        {"lr": 1.0, "weight_decay": 0.0, "foreach": False, "fused": False, "stochastic_rounding": 1},
    ):
        params = make_params()
        train(spec.make(params, **options), params, 3)
        assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))


def test_betas_as_a_list_that_is_edited_in_place():
    params, reference = make_params(), make_params()
    opt = subulp.AdamW(params, betas=[0.9, 0.99], stream=0)
    other = subulp.AdamW(reference, betas=(0.9, 0.99), stream=0)
    train(opt, params, 2)
    train(other, reference, 2)
    opt.param_groups[0]["betas"][0] = 0.5
    other.param_groups[0]["betas"] = (0.5, 0.99)
    train(opt, params, 2, start=2)
    train(other, reference, 2, start=2)
    assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))
    opt.param_groups[0]["betas"][0] = 1.5
    with pytest.raises(ValueError, match=r"betas\[0\]=1\.5"):
        opt.step()
