"""Gradients reduced over GPUs with the calls of OneTrainer's multi_gpu_util (23df383, 2026-08-19)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.bits import same_bits
from tests.models import generator, make_params
from tests.packages import load_example
from tests.processes import ENVIRONMENT

GradientRounding = load_example("onetrainer/gradient_reduction.py").GradientRounding
WORLD = 2


class Rank:
    """One process's parameters, and its side of the reduction in fp32 with stochastic rounding."""

    def __init__(self, seed: int = 0, names: bool = True) -> None:
        self.params = make_params(((4, 3), (7,), (), (33, 17)))
        self.params.append(Parameter(torch.zeros(3)))
        named = [(f"unet.{i}", p) for i, p in enumerate(self.params)] if names else self.params
        self.rounding = GradientRounding(named, seed)

    def backward(self, step: int, rank: int) -> None:
        g = generator(100 * step + rank)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)

    def store(self, param: Tensor, grad: Tensor) -> None:
        """What follows an all_reduce, synchronous or not."""
        grad = grad.to(torch.float32) if param.grad.dtype == torch.bfloat16 else grad
        grad /= WORLD
        if param.grad.dtype == torch.bfloat16:
            self.rounding.copy_stochastic_(param.grad, grad)
        else:
            param.grad = grad.to(param.grad.dtype)


def reduce_all(ranks: list[Rank], step: int, orders: list[list[int]], later: bool = False) -> list[list[Tensor]]:
    """One step of all ranks, each with its order of parameters; ``later``: stored when all are reduced."""
    for number, rank in enumerate(ranks):
        rank.backward(step, number)
    sums = [torch.stack([r.params[i].grad.float() for r in ranks]).sum(0) for i in range(len(ranks[0].params))]
    for rank, order in zip(ranks, orders, strict=True):
        rank.rounding.set_seed(step, torch.device("cpu"))
        waiting: deque[Callable[[], None]] = deque()
        for i in order:
            work = functools.partial(rank.store, rank.params[i], sums[i].clone())
            waiting.append(work) if later else work()
        while waiting:
            waiting.popleft()()
    return [[p.grad.clone() for p in rank.params] for rank in ranks]


def orders() -> list[list[int]]:
    return [[0, 1, 2, 3, 4], [4, 3, 1, 2, 0]]


@pytest.mark.parametrize("later", [False, True])
def test_ranks_have_equal_bits_whatever_their_order(later):
    ranks = [Rank(), Rank()]
    state = torch.get_rng_state()
    for step in (5, 6):
        one, other = reduce_all(ranks, step, orders(), later)
        assert all(map(same_bits, one, other))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_run_continues_at_its_step():
    whole = [Rank(), Rank()]
    for step in range(3):
        expected = reduce_all(whole, step, orders())
    resumed = reduce_all([Rank(), Rank()], 2, orders()[::-1])
    assert all(same_bits(a, b) for a, b in zip(expected[0], resumed[0], strict=True))


def test_steps_parameters_and_seeds_round_independently_and_in_the_mean():
    """A value a quarter of an ulp above 1: 0.25 of the draws go up."""
    n = 1 << 14
    found = {}
    for seed, step, name in ((0, 0, "a"), (0, 1, "a"), (0, 0, "b"), (1, 0, "a")):
        p = Parameter(torch.zeros(n, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        rounding = GradientRounding([(name, p)], seed)
        rounding.set_seed(step, p.device)
        rounding.copy_stochastic_(p.grad, torch.full((n,), 1 + 2.0**-9))
        found[seed, step, name] = up = p.grad.float() > 1
        # Five standard errors of a share of 0.25: false alarm 6e-7.
        assert abs(up.double().mean() - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5
    first = found.pop((0, 0, "a"))
    for other in found.values():
        both = (first & other).double().mean()
        assert abs(both - 0.0625) < 5 * (0.0625 * 0.9375 / n) ** 0.5


def test_gradients_of_others_are_refused_and_names_are_not_needed():
    rank = Rank(names=False)
    rank.backward(0, 0)
    rank.rounding.copy_stochastic_(rank.params[3].grad, torch.ones(33, 17))
    for target in (torch.zeros(3), rank.params[1].grad.clone()):
        with pytest.raises(ValueError, match=r"gradient of none of the 5 parameters"):
            rank.rounding.copy_stochastic_(target, target)
    with pytest.raises(ValueError, match="none of the 0"):
        GradientRounding([]).copy_stochastic_(torch.zeros(3), torch.zeros(3))


PROCESS = """
import sys
import torch
import torch.distributed as dist
from tests.examples.test_onetrainer_reduction import Rank
from tests.processes import leave

rank, store, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
this = Rank()
for step in range(2):
    this.backward(step, rank)
    this.rounding.set_seed(step, torch.device("cpu"))
    for param in this.params:
        grad = param.grad.to(torch.float32)
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
        this.store(param, grad)
torch.save([p.grad for p in this.params], f"{target}.{rank}")
leave()
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    command: list[Any] = [sys.executable, "-W", "ignore", "-c", PROCESS]
    root, environment = Path(__file__).parents[2], {**os.environ, **ENVIRONMENT}
    workers = [
        subprocess.Popen([*command, str(rank), tmp_path / "store", tmp_path / "grads"], cwd=root, env=environment)
        for rank in range(WORLD)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    one, other = (torch.load(tmp_path / f"grads.{rank}") for rank in range(WORLD))
    expected = reduce_all([Rank(), Rank()], 1, orders())[0]
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(one, other, expected, strict=True))
