"""transformers' GPT-2, tiny and without dropout, in bf16."""

from __future__ import annotations

from typing import Any

import torch


def tiny_gpt2(**changes: Any) -> Any:
    """The same weights whenever the settings are the same; ``changes`` are further settings of its config."""
    import transformers  # may be missing where this module is imported

    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"vocab_size": 16, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**{**size, **dropout, **changes})
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
