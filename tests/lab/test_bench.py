"""The benchmark: what it measures, and that it gives no figure to an implementation whose result is wrong."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import subulp
from subulp.lab import cli
from subulp.lab.bench import measure, memory, peers
from subulp.lab.bench.candidate import Candidate
from subulp.lab.bench.correctness import find_fault, ulp
from subulp.lab.bench.peers import HYPERPARAMETERS, IMPLEMENTATIONS
from subulp.lab.bench.workloads import WORKLOADS, Workload, gpt2, make_data, vit

MINI = Workload("mini", "three tensors", ((64, 65), (33,), ()))
OURS_AND_TORCH = [
    "subulp",
    "subulp-nearest",
    "subulp-eager",
    "torch-fused",
    "torch-foreach",
    "torch-loop",
    "onetrainer",
]


@pytest.fixture
def _mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "mini", MINI)


@pytest.mark.parametrize("name", OURS_AND_TORCH)
def test_right_implementations_pass_the_check(name: str) -> None:
    data = make_data(MINI.shapes, 0)
    candidate = Candidate(IMPLEMENTATIONS[name], data)
    assert find_fault(candidate.implementation, candidate.optimizer, candidate.params, data) is None


class LosesDecay(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**options, "weight_decay": 0.0})


class ForgetsBias(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state.get(p, {}).get("step", torch.zeros(())).fill_(1000)
        super().step(closure)


class RoundsUp(subulp.AdamW):
    """Each weight is one of its two neighbours, but always the upper one: only the mean gives it away."""

    def step(self, closure=None):
        before = [p.detach().double() for p in self.param_groups[0]["params"]]
        super().step(closure)
        for p, old in zip(self.param_groups[0]["params"], before, strict=True):
            step = ulp(torch.maximum(old.abs(), p.detach().double().abs()))
            coin = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) < 0.2
            p.data = torch.where(coin, p.detach().double() + step, p.detach().double()).bfloat16()


@pytest.mark.parametrize("wrong", [LosesDecay, ForgetsBias, RoundsUp])
def test_wrong_implementations_are_refused(wrong: Any) -> None:
    rounding = peers.STOCHASTIC if wrong is RoundsUp else peers.NEAREST
    if wrong is RoundsUp:  # wide enough that no single element is beyond it
        rounding = replace(rounding, weight=3)
    fused = {} if wrong is RoundsUp else {"fused": True}

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = wrong(params, **HYPERPARAMETERS, **fused)
        return optimizer

    implementation = peers.Implementation("wrong", "", make, rounding)
    data = make_data(MINI.shapes, 0)
    candidate = Candidate(implementation, data)
    fault = find_fault(implementation, candidate.optimizer, candidate.params, data)
    assert fault is not None
    assert "weight" in fault


def test_a_wrong_result_has_no_figures_and_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(IMPLEMENTATIONS["torch-loop"], name="wrong", make=lambda p: LosesDecay(p, **HYPERPARAMETERS))
    settings = measure.Settings(rounds=2, threads=1, seed=0, memory_budget=1 << 30, peak_memory=False)
    said: list[str] = []
    results = {r.name: r for r in measure.measure(MINI, [IMPLEMENTATIONS["subulp"], wrong], settings, said.append)}
    assert "weight" in (results["wrong"].refusal or "")
    assert results["wrong"].samples == []
    assert all(len(results[name].samples) == 2 for name in ("subulp", "torch-fused", measure.STREAM))
    assert len(results["subulp"].relative) == 2


@pytest.mark.usefixtures("_mini")
def test_the_command_prints_a_table_and_writes_its_files(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workloads", "mini", "--implementations", "subulp", "torch-foreach", "heavyball", "--rounds", "2"]
    status = cli.main(["bench", "step", *arguments, "--threads", "1", "--no-peak-memory", "--out", str(tmp_path)])
    assert status == 0
    out = capsys.readouterr().out
    assert f"| subulp {subulp.__version__}" in out
    with (tmp_path / "step.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} >= {"subulp", "torch-fused", "torch-foreach", "stream limit"}
    ours = next(row for row in rows if row["implementation"] == "subulp")
    assert float(ours["median_ms"]) > 0
    assert int(ours["bytes"]) == 14 * MINI.elements
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_the_models_have_their_published_sizes() -> None:
    """124,439,808: GPT-2 small as released; 86,567,656: torchvision's vit_b_16."""
    assert Workload("", "", gpt2()).elements == 124_439_808
    assert Workload("", "", vit()).elements == 86_567_656


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_sees_an_allocation_that_is_freed_again() -> None:
    size = 48 << 20

    def allocate() -> None:
        bytearray(b"x") * size

    # The kernel's counters are exact to about 0.1 MiB a core.
    assert abs(memory.peak_extra(allocate) - size) < 4 << 20


def test_ulp_is_the_spacing_of_bf16() -> None:
    for x in (1.0, 1.99, 2.0, 3e-39, 1e30):
        stored = torch.tensor(x).bfloat16()
        spacing = (stored.view(torch.int16) + 1).view(torch.bfloat16).double() - stored.double()
        assert float(ulp(stored.double())) == float(spacing)
