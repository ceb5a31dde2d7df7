"""The stored bits are those of the table; see tests/recorded_bits.py for what to do if they are not."""

import pytest
import torch

from tests import recorded_bits
from tests.recorded_bits import CASES, digest, recorded
from tests.specs import SPECS

FAST = [
    "AdamW/plain/bf16",
    "AdamW/amsgrad/bf16/named",
    "AdamW/plain/bf16/scaled",
    "AdamW/plain/bf16/states-fp32",
    "Adam/plain/bf16/groups",
    "SGD/plain/bf16/groups",
    "SGD/nesterov/bf16/seed",
    "Lion/plain/bf16/maximize",
    "SignSGD/plain/bf16/stream",
    "Adafactor/momentum/bf16/groups",
    "CAME/plain/bf16/groups",
    "Prodigy/plain/bf16/named",
    "Muon/plain/bf16/named",
    "round/fp32/bf16",
    "round/fp32/fp16",
    "round/fp32/e4m3",
    "round/fp32/e5m2",
    "nearest/bf16",
    "arithmetic/fp32/bf16",
    "EMA/bf16",
    "GradientAccumulation/bf16",
]
CHANGED = (
    "The stored bits have changed, which breaks what users were promised. If that is meant, announce it in CHANGELOG.md with "
    "**bits** and run `python -m tests.recorded_bits --renew`."
)


def test_every_case_is_recorded_and_every_record_has_a_case():
    assert list(recorded()) == list(CASES)
    assert {spec.name for spec in SPECS} <= {case.split("/")[0] for case in CASES}


@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("case", FAST)
def test_bits_are_as_recorded(case, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    assert digest(case, backend) == recorded()[case], CHANGED


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FAST])
def test_all_bits_are_as_recorded(case):
    assert digest(case, "eager") == recorded()[case], CHANGED


def test_a_digest_has_signs_but_no_payloads_of_nans(monkeypatch):
    def of(code):
        case = [("x", torch.tensor([code, 0x3F80], dtype=torch.int16).view(torch.bfloat16))]
        monkeypatch.setitem(CASES, "x", lambda backend: iter(case))
        return recorded_bits.digest("x", "eager")

    assert of(0x7FC0) == of(0x7F81) != of(-1) == of(-0x40)
    assert len({of(0), of(-0x8000), of(0x7F80), of(0x7FC0)}) == 4
