"""The Numba backend gives the bits of the eager backend, for every dtype mix, size, layout, border and thread count."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import subulp
from subulp.backends import eager, registry
from subulp.backends.bucket import single
from subulp.numerics.views import flat_views
from subulp.rounding import ADD, ADDCDIV, COPY, LERP
from subulp.rules.adamw import AMSGRAD, PLAIN, scalars_of
from tests.bits import same_bits
from tests.models import everything, generator, make_params, set_grads, train
from tests.specs import SPECS

slow = pytest.mark.slow
"""On tests that compile several kernels, two seconds each where none is cached."""

numba_cpu = pytest.importorskip("subulp.backends.numba.launch")

B, H, F = torch.bfloat16, torch.float16, torch.float32
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ADAMW_SCALARS = PLAIN.ordered(scalars_of(ADAMW, 3))


def tensors(rule, dtypes, shape, seed=0):
    """Target and states (squares positive), then the reads."""
    g = generator(seed)
    written = [torch.randn(shape, generator=g) for _ in range(1 + len(rule.states))]
    written[2:] = [t.square() for t in written[2:]]
    reads = [torch.randn(shape, generator=g) for _ in range(len(rule.reads))]
    return [t.to(d) for t, d in zip((*written, *reads), dtypes, strict=True)]


def compare(rule, inputs, scalars, stochastic=True, base=0, threads=None, arrange=lambda t: t):
    """Runs both backends on copies; every written tensor must have equal bits."""
    results = []
    for backend in (eager, numba_cpu):
        copies = [arrange(t.clone()) for t in inputs]
        views = flat_views(copies[: -len(rule.reads)], copies[-len(rule.reads) :], base)
        bucket = single(views, 5, 7, scalars)
        backend.run(rule, bucket, seed=0x123456789ABCDEF, stochastic=stochastic, read_factor=-1.0)
        results.append(copies)
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)
    return results[0]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        (B, B, B, B),
        *(pytest.param(t, marks=slow) for t in [(B, F, F, B), (F,) * 4, (F, B, B, F), (H, H, B, H), (B, B, H, F)]),
    ],
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
def test_dtype_mixes_and_sizes(dtypes, stochastic):
    for size in (1, 2, 7, 8, 63, 1000, 4097):
        compare(PLAIN, tensors(PLAIN, dtypes, (size,)), ADAMW_SCALARS, stochastic)


FORMATS = (B, H, F)
PAIRWISE = [tuple(FORMATS[k % 3] for k in (i, j, i + j, i + 2 * j)) for i in range(3) for j in range(3)]
"""An orthogonal array: every two of parameter, exp_avg, exp_avg_sq and gradient meet in each combination of dtypes."""


@slow
@pytest.mark.parametrize("dtypes", PAIRWISE, ids=str)
def test_every_pair_of_dtypes(dtypes):
    compare(PLAIN, tensors(PLAIN, dtypes, (1001,)), ADAMW_SCALARS)


def test_five_written_columns():
    compare(AMSGRAD, tensors(AMSGRAD, (B,) * 5, (5000,)), ADAMW_SCALARS)


@pytest.mark.parametrize("base", [1, 3, 2**31 - 5, 2**32 - 9, 2**33 - 8, 2**33 - 7, 2**40])
@pytest.mark.parametrize("dtypes", [(B, B, B, B), pytest.param((H, B, B, B), marks=slow)], ids=["bf16", "fp16"])
def test_odd_starts_and_borders_of_the_counter(base, dtypes):
    compare(PLAIN, tensors(PLAIN, dtypes, (41,)), ADAMW_SCALARS, base=base)


ARRANGEMENTS = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 1],
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("arrange", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
@pytest.mark.parametrize("base", [0, 2**32 - 100])
def test_layouts_keep_the_bits(arrange, base):
    inputs = tensors(PLAIN, (B, B, B, B), (6, 5, 4, 3))
    plain = compare(PLAIN, inputs, ADAMW_SCALARS, base=base)
    arranged = compare(PLAIN, inputs, ADAMW_SCALARS, base=base, arrange=arrange)
    for a, b in zip(plain, arranged, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(
    ("rule", "scalars", "target"),
    [
        pytest.param(
            rule, scalars, target, id=f"{name}-{target}", marks=slow if target == H and rule is not COPY else ()
        )
        for name, rule, scalars in (
            ("copy", COPY, ()),
            ("add", ADD, (0.3,)),
            ("addcdiv", ADDCDIV, (0.3,)),
            ("lerp", LERP, (1e-3,)),
        )
        for target in (B, H)
    ],
)
def test_rounding_rules_with_special_values(rule, scalars, target):
    """Infinities, zeros, subnormals, overflow; for the copy also NaNs of every payload (arithmetic may change those)."""
    g = generator(1)
    special = [
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        3.4e38,
        -3.39e38,
        1e-40,
        -1e-45,
        65504.0,
        65520.0,
        1e-7,
        6e-8,
        2.0**-24,
    ]
    reads = [
        torch.cat([torch.tensor(special), torch.randn(500, generator=g) * 10.0 ** (k - 3)])
        for k in range(len(rule.reads))
    ]
    if rule is COPY:
        nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, 0x7FC00000], dtype=torch.int32).view(F)
        reads[0] = torch.cat([reads[0], nans])
    else:
        reads = [r[2:] for r in reads]
    start = torch.randn(reads[0].shape, generator=g).to(target)
    compare(rule, [start, *reads], scalars)


@pytest.mark.parametrize(
    ("spec", "variants"),
    [
        pytest.param(spec, variants, id=f"{spec}-{len(variants)}", marks=marks)
        for spec in SPECS
        for variants, marks in ((spec.variants[:1], ()), (spec.variants[1:], slow))
        if variants
    ],
)
@pytest.mark.parametrize("dtype", [B, *(pytest.param(t, marks=slow) for t in (H, F, torch.complex64))], ids=str)
def test_optimizers_give_equal_bits(spec, variants, dtype):
    if dtype.is_complex and not spec.elementwise and spec.defaults.get("use_muon", True):
        params = make_params(dtype=dtype)
        with pytest.raises(RuntimeError, match="trains real parameters"):
            train(spec.make(params), params, 1)
        return
    for variant in variants:
        results = []
        for backend in ("eager", "numba"):
            params = make_params(dtype=dtype)
            opt = spec.make(params, backend=backend, **variant)
            train(opt, params, 5)
            results.append(everything(opt, params))
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_threads(threads):
    shapes = [(300_000,), *[(k,) for k in range(40)], (70_001,)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        params = make_params(shapes)
        opt = subulp.AdamW(params, backend="numba", stream=0)
        train(opt, params, 2)
    finally:
        torch.set_num_threads(before)
    reference = make_params(shapes)
    train(subulp.AdamW(reference, backend="eager", stream=0), reference, 2)
    assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))


@slow
def test_plans_follow_tensors_that_are_replaced():
    """Trainers re-point parameters, states and gradients between steps: each change must be seen, and take effect."""
    results = []
    for backend in ("eager", "numba"):
        params = make_params(((8, 8), (5,), (3,)))
        opt = subulp.AdamW(params, lr=1e-2, backend=backend, stream=0)
        changes = [
            lambda: None,
            lambda p=params: setattr(p[0], "data", p[0].data.clone()),
            lambda p=params: setattr(p[0], "data", p[0].data.t()),
            lambda p=params, o=opt: o.state[p[1]].update(exp_avg=o.state[p[1]]["exp_avg"].float()),
            lambda p=params, o=opt: setattr(
                o.state[p[1]]["exp_avg_sq"], "data", o.state[p[1]]["exp_avg_sq"].data.clone()
            ),
            lambda p=params, o=opt: setattr(o.state[p[1]]["step"], "data", o.state[p[1]]["step"].data.clone()),
            lambda p=params: setattr(p[2], "grad", None),
            lambda p=params: setattr(p[2], "data", p[2].data.float()),
            lambda o=opt: o.param_groups[0].update(betas=[0.8, 0.9]),
            lambda o=opt: o.param_groups[0].update(stochastic_rounding=False),
            lambda p=params, o=opt: o.state.pop(p[1]),
            lambda o=opt: o.load_state_dict(o.state_dict()),
        ]
        for step, change in enumerate(changes):
            set_grads(params, step)
            change()
            opt.step()
        results.append(everything(opt, params))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_steps_from_many_threads_at_once():
    """Autograd may call step_parameter from several threads; each parameter belongs to one of them."""
    params = make_params([(50_000,)] * 8)
    opt = subulp.AdamW(params, stream=0)
    set_grads(params, 0)
    group = opt.param_groups[0]
    threads = [threading.Thread(target=opt.step_parameter, args=(p, group, i)) for i, p in enumerate(params)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = make_params([(50_000,)] * 8)
    train(subulp.AdamW(reference, stream=0), reference, 1)
    assert all(same_bits(p, q) for p, q in zip(params, reference, strict=True))


@slow
def test_memory_of_a_step_does_not_grow_with_the_model():
    """No temporary of a parameter's size: peak resident memory grows by less than 2 MiB over 4 M parameters' 8 MiB."""
    script = """
import resource, torch, subulp
p = torch.nn.Parameter(torch.randn(4 << 20).bfloat16())
p.grad = torch.randn_like(p)
opt = subulp.AdamW([p], backend="numba")
opt.step()
small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    opt.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - small)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2048


@slow
def test_without_a_writable_cache_kernels_still_compile(tmp_path):
    """Numba looks beside the source, then in the user's cache; with neither writable it raises, and we go without."""
    script = """
import torch, subulp
from numba.core import caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda cls, *a: None)
p = torch.nn.Parameter(torch.ones(10).bfloat16())
p.grad = torch.ones_like(p)
subulp.AdamW([p], backend="numba").step()
print(float(p.detach().float().mean()))
"""
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert 0.99 < float(done.stdout) < 1.0


@slow
def test_kernels_cached_by_two_processes_do_not_mix(tmp_path):
    """Their symbols are numbered by process: with equal names one kernel would call the other's code and corrupt memory."""
    script = """
import sys, torch
from subulp.backends import eager
from subulp.backends.numba import launch as numba_cpu
from subulp.backends.bucket import single
from subulp.numerics.views import flat_views
from subulp.rules.adamw import PLAIN
for name in sys.argv[1:]:
    results = []
    for backend in (eager, numba_cpu):
        t = [torch.linspace(0.1, 1, 999).bfloat16() for _ in range(4)]
        t[1] = t[1].to(getattr(torch, name))
        backend.run(PLAIN, single(flat_views(t[:3], t[3:]), 1, 2, (0.1,) * 7), seed=3, stochastic=True)
        results.append(t)
    assert all(torch.equal(a, b) for a, b in zip(*results)), name
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for names in (["bfloat16"], ["float32"], ["float16"], ["bfloat16", "float32", "float16"]):
        subprocess.run([sys.executable, "-c", script, *names], check=True, env=environment)


def test_choice_is_visible_and_impossible_requests_are_explained():
    cpu = torch.device("cpu")
    assert registry.explain("auto", cpu, (B, B))[0] == "numba"
    assert registry.explain("auto", cpu, (torch.float64,))[0] == "eager"
    assert registry.explain("eager", cpu, (B,))[0] == "eager"
    with pytest.raises(RuntimeError, match=r"numba.*float64.*auto"):
        registry.choose("numba", cpu, (torch.float64,))
    with pytest.raises(RuntimeError, match=r"numba.*meta.*auto"):
        registry.choose("numba", torch.device("meta"), (B,))


def test_sparse_addresses_beyond_32_bits():
    """Element offsets beyond 2**31 inside one tensor, on memory that is mapped but mostly never touched."""
    big = 2**31 + 64
    try:
        storage = torch.UntypedStorage(2 * big)
    except RuntimeError:
        pytest.skip("cannot map 4 GiB of address space")
    p = torch.tensor([], dtype=B).set_(storage, 0, (big,), (1,))
    tail = p[-50:]
    tail.copy_(torch.randn(50, generator=generator(0)))
    small = tail.clone()
    source = torch.randn(50, generator=generator(1))
    subulp.add_stochastic_(tail, source, seed=3, offset=big - 50)
    subulp.add_stochastic_(small, source, seed=3, offset=big - 50)
    assert same_bits(tail, small)
