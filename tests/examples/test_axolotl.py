"""The axolotl plugin: loaded as axolotl loads plugins, then in transformers' real Trainer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import subulp
from tests.packages import huggingface, load_example

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("accelerate", reason="pip install accelerate")

pytestmark = huggingface


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """axolotl imports the class by its path and calls it without arguments; its base class does nothing."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"post_trainer_create": lambda self, cfg, trainer: None})  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return load_example("axolotl/subulp_plugin.py").SubulpPlugin()


def trainer(folder: Any) -> Any:
    """As axolotl leaves it for ``optimizer: adamw_torch`` and ``optim_args`` in a mapping."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    ids = torch.arange(8)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_beta2=0.95,
        optim="adamw_torch",
        optim_args="seed=3,state_dtype=fp32",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config).to(torch.bfloat16),
        args=arguments,
        train_dataset=[{"input_ids": ids, "labels": ids} for _ in range(16)],
    )


def test_the_plugin_gives_the_trainer_its_optimizer(plugin, tmp_path):
    t = trainer(tmp_path)
    plugin.post_trainer_create(SimpleNamespace(optim_args={"seed": 3, "state_dtype": "fp32"}), t)
    t.train()
    opt = getattr(t.optimizer, "optimizer", t.optimizer)
    assert type(opt) is subulp.AdamW
    assert sorted(group["weight_decay"] for group in opt.param_groups) == [0.0, 0.1]
    group = opt.param_groups[0]
    assert (tuple(group["betas"]), group["eps"], group["seed"]) == ((0.9, 0.95), 1e-8, 3)
    p = group["params"][0]
    assert p.dtype == torch.bfloat16
    assert opt.state[p]["exp_avg_sq"].dtype == torch.float32
    losses = [entry["loss"] for entry in t.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]


def test_options_are_optional_and_must_be_typed(plugin):
    arguments = SimpleNamespace(
        learning_rate=1e-5, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8
    )
    t = SimpleNamespace(args=arguments)
    plugin.post_trainer_create(SimpleNamespace(optim_args=None), t)
    assert t.optimizer_cls_and_kwargs[0] is subulp.AdamW
    assert t.optimizer_cls_and_kwargs[1]["lr"] == 1e-5
    with pytest.raises(TypeError, match="mapping"):
        plugin.post_trainer_create(SimpleNamespace(optim_args="seed=3"), t)
