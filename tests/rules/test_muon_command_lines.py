"""subulp.Muon from command lines that pass all parameters: sd-scripts' calls (48d368f, 2026-02-16), and Lightning itself."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import subulp
from tests.models import make_params

ARGUMENTS = ["grouping=True", "adam={'lr': 3e-4, 'weight_decay': 0.0}", "view='auto'"]


@pytest.mark.parametrize("as_groups", [False, True])
def test_sd_scripts(as_groups):
    """``--optimizer_type subulp.Muon --optimizer_args grouping=True "adam={'lr': 3e-4, 'weight_decay': 0.0}"``."""
    kwargs: dict[str, Any] = {}
    for argument in ARGUMENTS:
        key, value = argument.split("=")
        kwargs[key] = ast.literal_eval(value)
    module, _, name = "subulp.Muon".rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    params = make_params(((4, 3), (4,), (4, 3, 2, 2)))
    trainable = [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.02}] if as_groups else params
    opt = cls(trainable, lr=1e-3, **kwargs)
    rows = [(group["use_muon"], len(group["params"]), group["lr"]) for group in opt.param_groups]
    if as_groups:
        assert rows == [(True, 1, 0.01), (False, 1, 3e-4), (True, 1, 0.02)]
    else:
        assert rows == [(True, 2, 1e-3), (False, 1, 3e-4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightnings_command_line(tmp_path):
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    pytest.importorskip("jsonargparse", reason="pip install jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).square().mean()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)

    trainer = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false"]
    trainer += ["--trainer.enable_checkpointing=false", f"--trainer.default_root_dir={tmp_path}"]
    optimizer = ["--optimizer=subulp.Muon", "--optimizer.lr=0.02", "--optimizer.grouping=auto"]
    optimizer += ["--optimizer.adam={lr: 3e-4}"]
    cli = LightningCLI(Module, save_config_callback=None, args=["fit", *trainer, *optimizer])
    (opt,) = cli.trainer.optimizers
    assert isinstance(opt, subulp.Muon)
    assert [(g["use_muon"], len(g["params"]), g["lr"]) for g in opt.param_groups] == [(True, 2, 0.02), (False, 2, 3e-4)]
    assert all(opt.state[p]["step"] == 2 for group in opt.param_groups for p in group["params"])
