"""`subulp doctor`: the report is true, and a backend that differs or fails is found."""

import json

import pytest
import torch
from torch import Tensor

import subulp
from subulp.backends import registry
from subulp.lab import cli, doctor, self_test
from subulp.lab.tensors import written

pytest.importorskip("numba")


def test_it_passes_here_and_names_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch   {torch.__version__}" in out
    assert "numba, bf16  same bits: yes" in out
    assert "numba, fp32  same bits: yes" in out
    assert " NO " not in out


def test_json_is_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["name"] == "cpu"
    assert report["threads"]["torch"] == torch.get_num_threads()
    chosen = {row["dtypes"]: (row["backend"], row["reason"]) for row in report["backends"] if row["device"] == "cpu"}
    cpu = torch.device("cpu")
    assert chosen == {name: registry.explain("auto", cpu, dtypes) for name, dtypes in doctor.COMBINATIONS.items()}
    assert all(outcome["ok"] for outcome in report["self_test"])
    text = "\n".join(doctor.as_text(report))
    assert all(reason in text for _, reason in chosen.values())


@pytest.mark.parametrize("tensor", [0, -1])
def test_one_wrong_bit_is_found(
    tensor: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = self_test.step_once

    def wrong(backend: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = right(backend, dtype)
        if backend == "numba":
            tensors[tensor].view(-1)[-1] ^= 1
        return tensors

    monkeypatch.setattr(self_test, "step_once", wrong)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "numba, bf16  same bits: NO" in out
    assert "Pass backend='eager'" in out


def test_a_failing_backend_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = self_test.step_once

    def fails(backend: str, dtype: torch.dtype) -> list[Tensor]:
        if backend == "numba":
            raise OSError("no libLLVM")
        return right(backend, dtype)

    monkeypatch.setattr(self_test, "step_once", fails)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "numba, bf16  failed: OSError: no libLLVM" in out
    assert "backend='eager'" in out


def test_the_self_test_compares_what_a_step_writes_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would make the comparison empty: tensors that the step leaves as they were, or rounding without noise."""
    stochastic = self_test.step_once("eager", torch.bfloat16)
    inputs: list[Tensor] = []

    def nearest(self: subulp.AdamW) -> None:
        inputs.extend(t.detach().clone() for t in written(self))
        self.param_groups[0]["stochastic_rounding"] = False
        step(self)

    step = subulp.AdamW.step
    monkeypatch.setattr(subulp.AdamW, "step", nearest)
    rounded = self_test.step_once("eager", torch.bfloat16)
    assert len(inputs) == len(rounded) == 3 * len(self_test.SHAPES)
    for before, after, other in zip(inputs, rounded, stochastic, strict=True):
        if before.numel() > 1000:
            assert not torch.equal(before.view(torch.int16), after)
            assert not torch.equal(after, other)
