"""Which backend serves what, and what the user is told."""

from __future__ import annotations

import pytest
import torch

import subulp
from subulp.backends import registry
from tests.models import make_params, set_grads

BF16 = (torch.bfloat16,) * 4


@pytest.fixture(autouse=True)
def _no_memory():
    registry._choose.cache_clear()
    registry._tell_once.cache_clear()
    yield
    registry._choose.cache_clear()
    registry._tell_once.cache_clear()


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "numba"), ("mps", "eager"), ("cuda", "triton"), ("xpu", "triton")]
)
def test_auto_takes_the_fastest_backend_of_the_device(device, backend):
    pytest.importorskip("triton")
    name, reason = registry.explain("auto", torch.device(device), BF16)
    assert name == backend
    assert device in reason


def test_auto_falls_back_to_eager_and_says_how_to_be_faster(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"same bits: numba is not installed; pip install 'subulp\[cpu\]'"):
        assert registry.explain("auto", torch.device("cpu"), BF16)[0] == "eager"
    with pytest.warns(UserWarning, match="triton is not installed; pip install triton"):
        assert registry.explain("auto", torch.device("cuda"), BF16)[0] == "eager"


@pytest.mark.parametrize(
    ("name", "device", "dtypes", "message"),
    [
        ("triton", "cpu", BF16, "TRITON_INTERPRET=1"),
        ("triton", "mps", BF16, "serves CUDA, ROCm and XPU tensors, these are on mps; use backend='auto'"),
        ("triton", "cuda", (torch.float64,) * 4, "no kernels for torch.float64; use backend='auto'"),
        ("numba", "cuda", BF16, "serves CPU tensors, these are on cuda; use backend='auto'"),
        ("numba", "cpu", (torch.float64,) * 4, "no kernels for torch.float64"),
    ],
)
def test_a_backend_that_cannot_serve_says_why_and_what_to_do(name, device, dtypes, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=message):
        registry.choose(name, torch.device(device), dtypes)


def test_the_report_names_every_bucket_and_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    params, other = make_params(((3, 5), (7,))), make_params(((4,),), torch.float32)
    opt = subulp.AdamW([{"params": [*params, *other]}, {"params": make_params(((2,),)), "backend": "triton"}])
    first = opt.backend_report()
    assert [(r.group, r.backend, r.tensors, r.elements) for r in first] == [
        (0, "numba", 2, 22),
        (0, "numba", 1, 4),
        (1, "none", 1, 2),
    ]
    assert first[0].dtypes == ("bfloat16",) * 4
    assert "TRITON_INTERPRET" in first[2].reason
    assert "numba (fastest for cpu tensors)" in str(first[0])
    opt.param_groups[1]["backend"] = "eager"
    set_grads([p for g in opt.param_groups for p in g["params"]], 0)
    opt.step()
    assert [r.backend for r in opt.backend_report()] == ["numba", "numba", "eager"]
