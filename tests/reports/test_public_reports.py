"""Faults that users of other optimizers have reported: each tried here. docs/reports.md has the table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subulp
from tests.bits import same_bits
from tests.models import everything, generator, make_params, set_grads, train
from tests.specs import ELEMENTWISE, SPECS, first_fast

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


def test_pytorch_147437_eps_is_effective_in_fp16():
    """The square of 1e-5 underflows in fp16, and eps rounds to zero there: NaN after one step elsewhere."""
    p = Parameter(torch.ones(64, dtype=torch.float16))
    opt = subulp.AdamW([p], lr=1e-2, weight_decay=0.0)
    p.grad = torch.full_like(p, 1e-5)
    opt.step()
    assert ((1 - p.detach().float()) - 1e-2).abs().max() < 2 * 2.0**-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pytorch_108493_second_moments_never_turn_negative(dtype):
    g = generator(0)
    p = Parameter(torch.zeros(512, dtype=dtype))
    opt = subulp.AdamW([p], lr=0.0)
    for _ in range(200):
        scale = 10.0 ** torch.randint(-20, 4, (512,), generator=g)
        p.grad = (torch.randn(512, generator=g) * scale).to(dtype)
        opt.step()
        assert (opt.state[p]["exp_avg_sq"] >= 0).all()


@pytest.mark.parametrize("spec", ELEMENTWISE, ids=str)
def test_flaxchat_6_a_nan_gradient_stays_in_its_element(spec):
    p, q = (Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    opts = [spec.make([t]) for t in (p, q)]
    for t in (p, q):
        t.grad = torch.ones_like(t)
    p.grad.view(-1)[7].fill_(math.nan)
    for opt in opts:
        opt.step()
    assert p.detach().isnan().nonzero().tolist() in ([[7]], [])  # the sign of a NaN moves nothing in some
    keep = torch.arange(64) != 7
    assert same_bits(p.detach()[keep], q.detach()[keep])


def test_pytorch_95781_infinities_found_after_unscaling_skip_the_step():
    params = make_params(dtype=torch.float32)
    opt = subulp.AdamW(params)
    opt.amp_scaling = True
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    train(opt, params, 1)
    set_grads(params, 1)
    scaler.scale(torch.ones(()))
    params[0].grad.fill_(math.inf)
    scaler.unscale_(opt)
    before = [t.clone() for t in everything(opt, params)]
    scaler.step(opt)
    scaler.update()
    assert all(map(same_bits, everything(opt, params), before))
    assert scaler.get_scale() == 32.0


def test_lightning_15501_unscaled_gradients_are_not_unscaled_again():
    results = []
    for unscale_first in (True, False):
        params = make_params(dtype=torch.float32)
        opt = subulp.AdamW(params, stream=0)
        opt.amp_scaling = True
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        set_grads(params, 0)
        scaler.scale(torch.ones(()))
        for p in params:
            p.grad.mul_(64.0)
        if unscale_first:
            scaler.unscale_(opt)
        scaler.step(opt)
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


@all_optimizers
def test_pytorch_100701_an_empty_tensor_hides_no_other(spec):
    params = [Parameter(torch.ones(n, dtype=torch.float32)) for n in (1, 1, 0, 1, 0)]
    opt = spec.make(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert all((p.detach() != 1).all() for p in params)


@all_optimizers
def test_pytorch_106951_strides_of_size_one_dimensions(spec):
    p, q = (Parameter(torch.ones(100, 1, 100, dtype=torch.bfloat16)) for _ in range(2))
    opts = [spec.make([t]) for t in (p, q)]
    p.grad = torch.ones(100, 100, 1, dtype=torch.bfloat16).transpose(1, 2)
    q.grad = torch.ones_like(q)
    for opt in opts:
        opt.step()
    assert same_bits(p.detach(), q.detach())


def test_tt_metal_53212_loaded_betas_correct_the_bias():
    params, others = make_params(), make_params()
    opt = subulp.AdamW(params, betas=(0.9, 0.95))
    train(opt, params, 5)
    other = subulp.AdamW(others, betas=(0.9, 0.999))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(opt.state_dict())
    train(opt, params, 2, start=5)
    train(other, others, 2, start=5)
    assert all(map(same_bits, everything(opt, params), everything(other, others)))


@all_optimizers
def test_torchtitan_848_an_empty_state_is_a_parameter_without_steps(spec):
    params = make_params()
    opt = spec.make(params)
    train(opt, params, 2)
    saved = opt.state_dict()
    saved["state"][0] = {}
    opt.load_state_dict(saved)
    train(opt, params, 1)
    assert [float(opt.state[p]["step"]) for p in params[:2]] == [1, 3]


def test_lora_scripts_320_parameters_without_state_shift_no_others():
    params, others = make_params(((2, 2),) * 10), make_params(((2, 2),) * 10)
    opt, other = subulp.AdamW(params, stream=0), subulp.AdamW(others, stream=0)
    for step in range(2):
        set_grads(params, step)
        params[3].grad = None
        opt.step()
    other.load_state_dict(opt.state_dict())
    assert others[3] not in other.state or not other.state[others[3]]
    for i in (2, 4, 9):
        assert same_bits(other.state[others[i]]["exp_avg"], opt.state[params[i]]["exp_avg"])


@all_optimizers
def test_pytorch_143828_groups_may_be_empty(spec):
    params = make_params()
    opt = spec.make([{"params": params}, {"params": []}])
    train(opt, params, 1)
    opt.load_state_dict(opt.state_dict())
    train(opt, params, 1)


# Not Prodigy: its one estimate for all groups makes a late group change the steps of the old one, as it should.
@pytest.mark.parametrize("spec", [s for s in SPECS if s.name != "Prodigy"], ids=str)
def test_oneflow_8698_a_late_group_leaves_the_noise_of_the_old_one(spec):
    first, second, late = make_params(), make_params(), make_params(((3, 3),), seed=4)
    opt, alone = spec.make(first), spec.make(second)
    train(opt, first, 2)
    train(alone, second, 2)
    opt.add_param_group({"params": late})
    set_grads(late, 0)
    train(opt, first, 2, start=2)
    train(alone, second, 2, start=2)
    assert all(map(same_bits, everything(opt, first), everything(alone, second)))


def test_pytorch_40967_a_parameter_that_is_listed_twice_warns_as_in_torch():
    p = Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        subulp.AdamW([p, p])


def test_pytorch_82486_an_empty_sparse_gradient_is_refused_by_name():
    embedding = nn.Embedding(5, 1, padding_idx=0, sparse=True)
    opt = subulp.AdamW(embedding.parameters())
    embedding(torch.tensor([0, 0])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()


def test_pytorch_18404_rows_without_gradients_stay():
    embedding = nn.Embedding(50, 8).bfloat16()
    before = embedding.weight.detach().clone()
    opt = subulp.AdamW(embedding.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(20):
        embedding(torch.tensor([3, 7])).float().sum().backward()
        opt.step()
        opt.zero_grad()
    moved = (embedding.weight.detach() != before).any(1).nonzero().view(-1).tolist()
    assert moved == [3, 7]


@first_fast(SPECS)
def test_nanochat_527_groups_of_mixed_dtypes(spec):
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    params = [Parameter(torch.ones(6, 4).to(d)) for d in dtypes]
    opt = spec.make(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    assert all(p.isfinite().all() and (p != 1).any() for p in params)


def test_pytorch_126854_groups_do_not_share_a_rate_tensor():
    lr = torch.tensor(1.0)
    a, b = make_params(((2,), (3,)))
    opt = subulp.SGD([{"params": [a]}, {"params": [b]}], lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, [lambda t: 0.5, lambda t: 0.25])
    for _ in range(5):
        set_grads([a, b], 0)
        opt.step()
        schedule.step()
    assert [float(group["lr"]) for group in opt.param_groups] == [0.5, 0.25]


@all_optimizers
def test_sd_scripts_1834_hooks_reach_the_weights_that_are_saved(spec):
    """Hooks registered before a wrapper: the weights must move."""
    model = nn.Linear(4, 4).bfloat16()
    before = model.weight.detach().clone()
    options: dict[str, Any] = {"lr": 0.5} if spec.name != "Prodigy" else {}
    subulp.FusedBackward(opt := spec.make(model.parameters(), **options))
    wrapped = nn.Sequential(model)
    wrapped(torch.ones(2, 4).bfloat16()).float().square().sum().backward()
    assert not same_bits(model.weight.detach(), before)
    assert float(opt.state[model.weight]["step"]) == 1


def test_lbann_56_denormal_numbers_have_the_bits_of_the_reference():
    """What they cost depends on the processor."""
    results = []
    for backend in ("eager", "numba"):
        p = Parameter(torch.full((4096,), 1e-39).bfloat16())
        opt = subulp.AdamW([p], lr=1e-40, backend=backend, stream=0)
        for step in range(3):
            p.grad = torch.full_like(p, 1e-38 if step == 0 else 0.0)
            opt.step()
        results.append(everything(opt, [p]))
    assert all(map(same_bits, *results))


class PeakOfNewMemory(TorchDispatchMode):
    """The most bytes that tensors made under this mode held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := t.untyped_storage()._cdata) not in before:
                self.live[key] = (StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@all_optimizers
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_accelerate_296_loading_holds_the_state_once(spec, saved_dtype):
    """Peak: the new state and one tensor; afterwards: the new state."""
    shapes = [(64, 64)] * 8
    saved = make_params(shapes)
    opt = spec.make(saved)
    train(opt, saved, 1)
    state_dict = opt.state_dict()
    for entry in state_dict["state"].values():
        entry.update({k: v.to(saved_dtype) for k, v in entry.items() if k.startswith("exp_avg") and v.dim() == 2})
    params = make_params(shapes)
    opt = spec.make(params)
    with PeakOfNewMemory() as memory:
        opt.load_state_dict(state_dict)
    kept = [list(opt.state.values()), [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]]
    tensors = [t for t in tree_leaves(kept) if isinstance(t, torch.Tensor)]
    size = sum(t.untyped_storage().nbytes() for t in tensors)
    largest = max(t.numel() * 4 for t in tensors)
    assert size <= memory.peak <= size + largest  # size <=: the mode has seen the state
    del state_dict, saved
    memory.live = {key: entry for key, entry in memory.live.items() if not entry[0].expired()}
    assert sum(nbytes for _, nbytes in memory.live.values()) <= size


@all_optimizers
def test_heavyball_56_state_is_kept_for_parameters_alone(spec):
    params = make_params()
    opt = spec.make(params)
    for _ in range(2):
        train(opt, params, 2)
        assert len(opt.state_dict()["state"]) == len(opt.state)
        for p in params:  # validation under averaged or offloaded weights
            p.data = p.data.clone()
        assert {id(p) for p in opt.state} <= {id(p) for p in params}


def test_pytorch_140898_a_fresh_optimizer_loads_though_gradients_are_set():
    """torch makes no dummy step then; full and flattened dicts need ``init_state()``, without it torch raises."""

    def fresh() -> tuple[nn.Module, subulp.AdamW]:
        net = nn.Linear(4, 3).bfloat16()
        opt = subulp.AdamW(net.parameters(), lr=1e-2, stream=0)
        net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        return net, opt

    net, opt = fresh()
    for _ in range(3):
        opt.step()
    for options in ({}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}):
        chosen = StateDictOptions(**options)
        saved = get_optimizer_state_dict(net, opt, options=chosen)
        other, loaded = fresh()
        if options:
            loaded.init_state()
        set_optimizer_state_dict(other, loaded, optim_state_dict=saved, options=chosen)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert opt.state[p].keys() == loaded.state[q].keys()
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert same_bits(opt.state[p][name], loaded.state[q][name])
