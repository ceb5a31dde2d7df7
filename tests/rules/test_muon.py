"""Muon: against torch's, its groups, its batches, and matrices that are sharded. (The table tests its AdamW groups.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import subulp
from subulp.rules import muon
from tests.bits import same_bits
from tests.models import everything, make_params, train
from tests.processes import ENVIRONMENT

SHAPES = ((64, 33), (33, 64), (64, 33), (5, 5), (1, 7), (0, 4))


@pytest.mark.parametrize(
    "options",
    # Three in the fast suite: each has a part of the formula that the others do not show.
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"weight_decay": 5.0, "momentum": 0.5, "eps": 30.0, "ns_coefficients": (2.0, -1.5, 0.5)},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    ],
    ids=str,
)
def test_fp32_matches_torch(options):
    shapes = SHAPES[:-1]  # torch's divides by zero rows
    params, reference = make_params(shapes, torch.float32), make_params(shapes, torch.float32)
    train(subulp.Muon(params, **options), params, 50)
    train(torch.optim.Muon(reference, **options), reference, 50)
    for p, q in zip((p.detach() for p in params), (q.detach() for q in reference), strict=True):
        # The iteration is bf16: where fp32 momenta differ by an ulp, a bf16 number may round the other way, 2**-8 of an
        # entry of O, whose entries are at most 1.3; the iteration itself may amplify that fourfold (its slope at 0 is 3.4).
        ratio = 0.2 * max(p.shape) ** 0.5 if "adjust_lr_fn" in options else max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        assert (p - q).abs().max() < 50 * 1e-3 * ratio * 1.3 * 4 * 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_backends_give_equal_bits(dtype):
    results = []
    for backend in ("eager", "numba"):
        params = make_params(SHAPES, dtype)
        opt = subulp.Muon(params, lr=0.02, backend=backend, stream=0)
        train(opt, params, 3)
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


def test_batches_and_single_updates_give_equal_bits(monkeypatch):
    results = []
    for limit in (1 << 24, 1):
        monkeypatch.setattr(muon, "BATCH", limit)
        params = make_params(SHAPES)
        opt = subulp.Muon(params, lr=0.02, stream=0)
        train(opt, params, 3)
        results.append(everything(opt, params))
    assert all(map(same_bits, *results))


def test_updates_are_orthogonal():
    p = Parameter(torch.zeros(48, 20))
    opt = subulp.Muon([p], lr=1.0, weight_decay=0.0)
    train(opt, [p], 1)
    values = torch.linalg.svdvals(p.detach()) / (48 / 20) ** 0.5
    # Jordan 2024: five steps bring singular values to between 0.68 and 1.13 of 1; bf16 adds 2**-7.
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_momentum_in_bf16_follows_fp32_in_the_mean():
    """Each step moves the buffer by at most a tenth of an ulp, which nearest rounding would lose."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        p = Parameter(torch.zeros(64, 64, dtype=dtype))
        opt = subulp.Muon([p], lr=0.0)
        p.grad = torch.ones_like(p)
        opt.step()
        opt.state[p]["momentum_buffer"].fill_(1.0)
        for _ in range(40):
            p.grad = torch.full_like(p, 1 - 2.0**-7)
            opt.step()
        found.append(opt.state[p]["momentum_buffer"].double().mean())
    exact = found[1]
    assert 1 - exact > 2.0**-8
    # 4096 elements; a rounding has variance q (1 - q) <= 0.09 ulp**2 at q <= 0.1: 40 steps, sd at most 1.9 ulp of 2**-8. Five
    # standard errors: false alarm 6e-7.
    assert abs(found[0] - exact) < 5 * 1.9 * 2.0**-8 / 64


@pytest.mark.parametrize("flag", [{"use_muon": False}, {"optim_type": "adam"}, {"optim_type": "AdamW"}], ids=str)
def test_other_groups_take_adamw(flag):
    matrices, rest = make_params(((6, 5),)), make_params(((7,), (2, 3, 4), (4, 4)))
    alone = make_params(((7,), (2, 3, 4), (4, 4)))
    groups = [{"params": matrices, "optim_type": "muon"}, {"params": rest, "lr": 3e-3, "weight_decay": 0.2, **flag}]
    opt = subulp.Muon(groups, lr=0.02, stream=0)
    # The noise of an unnamed parameter goes by its position over all groups.
    other = subulp.AdamW(
        [{"params": make_params(((6, 5),))}, {"params": alone}], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.2, stream=0
    )
    train(opt, [*matrices, *rest], 4)
    train(other, [*other.param_groups[0]["params"], *alone], 4)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(rest, alone, strict=True))
    assert set(opt.state[rest[0]]) == {"step", "exp_avg", "exp_avg_sq", "stream"}
    assert set(opt.state[matrices[0]]) == {"step", "momentum_buffer", "stream"}


def test_checkpoints_of_torch_load_and_ours_resume():
    params, theirs = make_params(SHAPES[:2]), make_params(SHAPES[:2])
    other = torch.optim.Muon(theirs, lr=0.02)
    train(other, theirs, 3)
    opt = subulp.Muon(params, lr=0.02)
    opt.load_state_dict(other.state_dict())
    assert same_bits(opt.state[params[0]]["momentum_buffer"], other.state[theirs[0]]["momentum_buffer"])
    train(opt, params, 2)
    resumed = [Parameter(p.detach().clone()) for p in params]
    again = subulp.Muon(resumed, lr=0.02)
    again.load_state_dict(opt.state_dict())
    train(opt, params, 2, start=2)
    train(again, resumed, 2, start=2)
    assert all(map(same_bits, everything(opt, params), everything(again, resumed)))


def test_what_is_no_matrix_is_refused_with_the_cure():
    for params in (make_params(((7,),)), [{"params": make_params(((2, 3, 4),))}]):
        with pytest.raises(ValueError, match=r"shape \(.*use_muon=False"):
            subulp.Muon(params)
    opt = subulp.Muon(make_params(((3, 4),)))
    with pytest.raises(ValueError, match=r"shape \(7,\) .*group 1"):
        opt.add_param_group({"params": make_params(((7,),))})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="ns_steps=100"):
        subulp.Muon(make_params(((3, 4),)), ns_steps=100)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import subulp
from tests.bits import same_bits
from tests.models import make_params, set_grads
from tests.processes import leave

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for dim in (0, 1):
    plain = make_params(((7, 5), (5, 9), (1, 4), (3, 4, 5), (6, 3, 2, 2)))
    sharded = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(dim)])) for p in plain]
    opts = [subulp.Muon(params, lr=0.02, view="auto", stream=0) for params in (plain, sharded)]
    for step in range(3):
        set_grads(plain, step)
        for p, q in zip(plain, sharded):
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(dim)])
        for opt in opts:
            opt.step()
    for p, q in zip(plain, sharded):
        assert same_bits(p.detach(), q.detach().full_tensor()), (dim, p.shape)
leave()
"""


@pytest.mark.slow
def test_sharded_matrices_have_the_bits_of_whole_ones(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", SHARDED]
    environment = {**os.environ, **ENVIRONMENT}
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], cwd=root, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
