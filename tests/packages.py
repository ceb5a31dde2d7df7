"""For tests that run other packages, or the programs in examples/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

huggingface = [
    pytest.mark.slow,
    # Of the packages themselves, and of torch on a machine without a GPU.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
"""Marks of a test module that runs transformers or Accelerate."""


def load_example(path: str) -> Any:
    """The module in this file of examples/, which is no package."""
    file = Path(__file__).parents[1] / "examples" / path
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
