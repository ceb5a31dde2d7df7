"""The base class: determinism, parameters and gradients of every kind, errors that leave everything as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import subulp
from tests.bits import same_bits
from tests.models import SHAPES, everything, generator, make_params, set_grads, train
from tests.specs import ELEMENTWISE, SPECS, first_fast

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)
elementwise_optimizers = pytest.mark.parametrize("spec", ELEMENTWISE, ids=str)


def test_every_exported_optimizer_is_in_the_table():
    exported = {
        name
        for name in subulp.__all__
        if isinstance(getattr(subulp, name), type) and issubclass(getattr(subulp, name), torch.optim.Optimizer)
    }
    assert exported == {spec.name for spec in SPECS}


SCRIPT = """
import hashlib, json, sys, torch
torch.manual_seed(int(sys.argv[1]))
torch.randn(int(sys.argv[1]))
from tests.bits import bits
from tests.models import everything, make_params, train
from tests.specs import SPECS
results = {}
for spec in SPECS:
    params = make_params()
    opt = spec.make(params, seed=5)
    train(opt, params, 4)
    results[spec.name] = hashlib.sha256(b"".join(bits(t).numpy().tobytes() for t in everything(opt, params))).hexdigest()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results_of_two_processes():
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, seed], stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )
        for seed in ("1", "99")
    ]
    results = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    return [json.loads(result) for result in results]


@all_optimizers
def test_two_processes_with_other_torch_seeds_give_equal_bits(spec, results_of_two_processes):
    first, second = results_of_two_processes
    assert first[spec.name] == second[spec.name]


@all_optimizers
def test_a_step_leaves_torchs_generator_alone(spec):
    params = make_params()
    opt = spec.make(params)
    set_grads(params, 0)
    before = torch.get_rng_state()
    opt.step()
    assert torch.equal(before, torch.get_rng_state())


@all_optimizers
def test_order_of_stepping_does_not_matter(spec):
    reference = make_params()
    opt = spec.make(reference)
    train(opt, reference, 3)
    params = make_params()
    other = spec.make(params)
    group = other.param_groups[0]
    for step in range(3):
        set_grads(params, step)
        order = torch.randperm(len(params), generator=generator(step)).tolist()
        for n, i in enumerate(order):
            if n % 2:
                other.step_parameter(params[i], group, i)
            else:
                other.step_param(params[i])
    for a, b in zip(everything(opt, reference), everything(other, params), strict=True):
        assert same_bits(a, b)


@all_optimizers
def test_seeds_change_the_bits_and_names_decide_the_stream(spec):
    shape = ((4096,),)

    def run(seed=0, name=None, before=0):
        filler, (p,) = make_params([(2,)] * before), make_params(shape)
        named = [(f"f{i}", f) for i, f in enumerate(filler)] + [(name, p)]
        opt = spec.make(named if name else [*filler, p], seed=seed)
        train(opt, [p], 3)
        return p

    assert same_bits(run(), run())
    assert not same_bits(run(), run(seed=1))
    assert not same_bits(run(), run(before=1))  # without names the position counts
    assert same_bits(run(name="a.weight"), run(name="module.a.weight", before=3))
    assert not same_bits(run(name="a.weight"), run(name="b.weight"))


@all_optimizers
def test_equal_parameters_take_independent_noise(spec):
    """llm.c #597: equal tensors with equal gradients must not round alike. 4096 elements, many fractions."""
    params = [Parameter(torch.linspace(0.5, 1, 4096).bfloat16()) for _ in range(3)]
    opt = spec.make(params, lr=1e-4)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    for a in range(3):
        for b in range(a):
            assert not same_bits(params[a], params[b])


@all_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_default_dtype_changes_nothing(spec, dtype):
    reference = make_params()
    opt = spec.make(reference)
    train(opt, reference, 3)
    params = make_params()
    torch.set_default_dtype(dtype)
    try:
        other = spec.make(params)
        for step in range(3):
            set_grads(params, step)
            other.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(everything(opt, reference), everything(other, params), strict=True):
        assert same_bits(a, b)


@all_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_the_eager_backend_do_not_show(spec, dtype, monkeypatch):
    results = []
    for chunk in (1 << 18, 64, 7):
        monkeypatch.setattr("subulp.backends.eager.CHUNK", chunk)
        params = make_params(((500,), (3, 33)), dtype)
        opt = spec.make(params, backend="eager")
        train(opt, params, 2)
        results.append(everything(opt, params))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@all_optimizers
def test_memory_format_and_strides_do_not_matter(spec):
    shape = (4, 6, 5, 8)
    (reference,) = make_params([shape])
    opt = spec.make([reference])
    train(opt, [reference], 3)
    layouts = [
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ]
    for layout in layouts:
        for grads_too in (False, True):
            base = layout(make_params([shape])[0].detach())
            p = Parameter(base)
            other = spec.make([p])
            for step in range(3):
                set_grads([p], step)
                p.grad = layout(p.grad) if grads_too else p.grad.contiguous()
                other.step()
            assert p.data_ptr() == base.data_ptr()
            for a, b in zip(everything(opt, [reference]), everything(other, [p]), strict=True):
                assert same_bits(a.contiguous(), b.contiguous())


@all_optimizers
def test_an_update_lands_in_the_slice_and_nowhere_else(spec):
    base = torch.full((64, 128), 3.0, dtype=torch.bfloat16)
    p = Parameter(base[:, ::2])
    p.grad = torch.ones_like(p)
    spec.make([p], lr=0.5).step()
    assert (base[:, ::2] != 3).all()
    assert (base[:, 1::2] == 3).all()


@first_fast(SPECS)
@pytest.mark.parametrize(
    "grad_dtype", [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float16, torch.float64))]
)
def test_gradients_of_another_dtype(spec, grad_dtype):
    """A gradient whose values bf16 holds gives the same bits in any dtype."""
    reference, params = make_params(), make_params()
    for group, dtype in ((reference, torch.bfloat16), (params, grad_dtype)):
        opt = spec.make(group)
        for step in range(3):
            for p in group:
                g = torch.randn(p.shape, generator=generator(step)).bfloat16()
                p.data, p.grad = p.data, None
                if dtype != p.dtype:
                    p.grad_dtype = None
                p.grad = g.to(dtype)
            opt.step()
    assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))


@first_fast(ELEMENTWISE)
def test_complex_parameters_are_pairs_of_reals(spec):
    complex_params = make_params(((5, 3),), torch.complex64)
    real = [Parameter(torch.view_as_real(p.detach()).clone()) for p in complex_params]
    for variant in spec.variants:
        opts = [spec.make(complex_params, **variant), spec.make(real, **variant)]
        for step in range(3):
            set_grads(complex_params, step)
            for p, q in zip(complex_params, real, strict=True):
                q.grad = torch.view_as_real(p.grad).clone()
            for opt in opts:
                opt.step()
        assert same_bits(torch.view_as_real(complex_params[0].detach()), real[0].detach())


@all_optimizers
def test_parameters_without_gradient_are_left_alone(spec):
    params = make_params(((4,), (4,), (4,)))
    params[2].requires_grad_(False)
    opt = spec.make(params)
    before = params[1].detach().clone()
    for _ in range(3):
        params[0].grad = torch.ones_like(params[0])
        opt.step()
    opt.zero_grad()
    opt.step()
    assert same_bits(params[1].detach(), before)
    assert params[1] not in opt.state or not opt.state[params[1]]
    assert float(opt.state[params[0]]["step"]) == 3
    opt.init_state()
    assert params[2] not in opt.state
    assert float(opt.state[params[1]]["step"]) == 0


@all_optimizers
def test_gradients_are_not_touched(spec):
    for variant in (*spec.variants, {"maximize": True, "weight_decay": 0.5}):
        params = make_params()
        set_grads(params, 0)
        before = [p.grad.clone() for p in params]
        opt = spec.make(params, **variant)
        opt.step()
        assert all(same_bits(p.grad, g) for p, g in zip(params, before, strict=True))


@elementwise_optimizers
def test_mixed_dtypes_in_one_group(spec):
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.complex64, torch.bfloat16]
    shapes = [SHAPES[0]] * len(dtypes)
    params = [make_params([s], d, seed=i)[0] for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    opt = spec.make(params)
    train(opt, params, 3)
    for i, d in enumerate(dtypes):
        alone = [make_params([s], e, seed=j)[0] for j, (s, e) in enumerate(zip(shapes, dtypes, strict=True))]
        other = spec.make(alone)
        for step in range(3):
            set_grads(alone, step)
            other.step_parameter(alone[i], other.param_groups[0], i)
        assert same_bits(params[i].detach(), alone[i].detach()), d


@all_optimizers
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda p: setattr(p, "grad", torch.ones(3).to_sparse()), RuntimeError, r"sparse.*sparse=False"),
        (lambda p: setattr(p, "data", torch.ones(7)), ValueError, r"shape \(3,\).*|\(7,\)"),
        (lambda p: setattr(p, "data", torch.ones(3).to(torch.float8_e4m3fn)), TypeError, r"float8_e4m3fn.*bfloat16"),
    ],
    ids=["sparse", "shape", "float8"],
)
def test_invalid_tensors_stop_the_step_before_anything_changes(spec, spoil, error, match):
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    opt = spec.make([{"params": params[:1]}, {"params": params[1:]}])
    train(opt, params, 2)
    before = [p.detach().clone() for p in params[:2]]
    set_grads(params, 3)
    spoil(params[2])
    with pytest.raises(error, match=match):
        opt.step()
    assert all(same_bits(p.detach(), q) for p, q in zip(params, before, strict=False))
    assert all(float(opt.state[p]["step"]) == 2 for p in params)


@all_optimizers
def test_states_of_another_shape_are_refused(spec):
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(4))]
    opt = spec.make(params)
    train(opt, params, 1)
    name = opt.states(opt.param_groups[0], params[1])[0].name
    opt.state[params[1]][name] = torch.zeros(5)
    with pytest.raises(ValueError, match=rf"'{name}'.*\(4,\).*\(5,\).*checkpoint"):
        opt.step()
    assert float(opt.state[params[0]]["step"]) == 1


@all_optimizers
def test_unsupported_parameters_are_refused_at_construction(spec):
    with pytest.raises(TypeError, match=r"float8_e5m2.*bfloat16.*requires_grad_\(False\)"):
        spec.make([Parameter(torch.ones(3).to(torch.float8_e5m2))])
    frozen = Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    spec.make([frozen, *make_params()])


@all_optimizers
def test_closure_runs_once_with_gradients_and_its_value_returns(spec):
    p = Parameter(torch.ones(3))
    opt = spec.make([p])
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure) == 3.0
    assert calls == [True]
    assert float(opt.state[p]["step"]) == 1


@elementwise_optimizers
def test_differentiable_records_the_update(spec):
    start = torch.ones(3, dtype=torch.float64, requires_grad=True)
    lr = 0.1
    p = start.clone()
    p.retain_grad()
    opt = spec.make([Parameter(torch.ones(3, dtype=torch.float64))], lr=lr, differentiable=True)
    opt.param_groups[0]["params"] = [p]
    p.grad = torch.ones(3, dtype=torch.float64)
    opt.step()
    (gradient,) = torch.autograd.grad(p.sum(), start)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).all()
    bad = spec.make(make_params(), differentiable=True)
    with pytest.raises(ValueError, match=r"differentiable=True.*float32"):
        train(bad, bad.param_groups[0]["params"], 1)


@all_optimizers
def test_fp64_parameters_are_computed_in_fp64(spec):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's Adafactor divides by the number of elements
    params, reference = make_params(shapes, torch.float64), make_params(shapes, torch.float64)
    opt, other = spec.make(params), spec.reference(reference, **spec.defaults)
    train(opt, params, 20)
    train(other, reference, 20)
    for p, q in zip(params, reference, strict=True):
        # 20 steps of about 20 roundings of 2**-53 each, on values below 8.
        assert (p - q).abs().max() < 8 * 400 * 2.0**-53 if p.numel() else True


@all_optimizers
def test_states_follow_the_parameter_and_loose_parameters_are_refused(spec):
    opt = spec.make(make_params())
    stranger = Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    with pytest.raises(ValueError, match="add_param_group"):
        opt.step_param(stranger)


def test_subclasses_do_not_show_namesakes_of_torch_but_their_own():
    """Tools that look optimizers up by short names (jsonargparse) refuse a name that two classes have."""

    class Mine(subulp.AdamW):
        pass

    def below(cls):
        return {cls, *(c for kind in cls.__subclasses__() for c in below(kind))}

    shown = below(torch.optim.Optimizer)
    assert {Mine, subulp.Lion, torch.optim.AdamW} <= shown
    assert not {subulp.AdamW, subulp.Adam, subulp.SGD} & shown
    assert issubclass(Mine, torch.optim.Optimizer)
