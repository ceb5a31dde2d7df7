"""Lightning's Trainer, the real package: automatic optimisation, clipping, precisions, resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import subulp
from tests.bits import same_bits
from tests.models import generator

lightning = pytest.importorskip("lightning", reason="pip install lightning")

pytestmark = [
    pytest.mark.slow,
    # Lightning's advice on workers, loggers and devices, and its dependencies' deprecations.
    pytest.mark.filterwarnings("ignore"),
]


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self, cls: Any = subulp.AdamW, **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        g = generator(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        self.make = lambda: cls(self.parameters(), **options)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        x = x.to(next(self.parameters()).dtype)
        loss = (self.net(x).float().squeeze(-1) - y.float()).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        opt = self.make()
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}


def data() -> torch.utils.data.DataLoader[Any]:
    x = torch.randn(256, 8, generator=generator(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=16)


def fit(module: Module, folder: Any, epochs: int, checkpoint: Any = None, **options: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )
    trainer.fit(module, data(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("cls", [subulp.AdamW, subulp.SGD])
def test_automatic_optimisation_with_clipping(cls, precision, tmp_path):
    module = Module(cls, lr=2e-2)
    fit(module, tmp_path, 3, precision=precision, gradient_clip_val=1.0, enable_checkpointing=False)
    assert sum(module.losses[-16:]) < 0.8 * sum(module.losses[:16])


def test_training_resumes_bit_for_bit(tmp_path):
    whole, first, second = (Module(lr=1e-2, stream=0) for _ in range(3))
    options = {"precision": "bf16-true"}
    fit(whole, tmp_path / "a", 4, **options, enable_checkpointing=False)
    trainer = fit(first, tmp_path / "b", 2, **options)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(second, tmp_path / "c", 4, checkpoint=tmp_path / "half.ckpt", **options, enable_checkpointing=False)
    for (name, p), q in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert same_bits(p.detach(), q[1].detach()), name


class Plain(lightning.LightningModule):  # type: ignore[name-defined]
    """Leaves its optimizer to the command line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return (self.net(x.to(self.net.weight.dtype)).float().squeeze(-1) - y.float()).square().mean()


def command_line(*arguments: str) -> Any:
    pytest.importorskip("jsonargparse", reason="pip install 'jsonargparse[signatures]'")
    from lightning.pytorch.cli import LightningCLI

    trainer = {"accelerator": "cpu", "max_steps": 3, "precision": "bf16-true", "logger": False}
    trainer |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return LightningCLI(Plain, run=False, args=list(arguments), trainer_defaults=trainer, save_config_callback=None)


def test_the_command_line_takes_the_full_path_and_every_option(tmp_path):
    options = [
        "--optimizer.lr=1e-2",
        "--optimizer.betas=[0.9, 0.95]",
        "--optimizer.state_dtype=fp32",
        "--optimizer.seed=3",
    ]
    cli = command_line("--optimizer=subulp.AdamW", *options, f"--trainer.default_root_dir={tmp_path}")
    cli.trainer.fit(cli.model, data())
    (opt,) = cli.trainer.optimizers
    assert type(opt) is subulp.AdamW
    group = opt.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["seed"]) == (1e-2, (0.9, 0.95), 3)
    assert cli.model.net.weight.dtype == torch.bfloat16
    assert opt.state[cli.model.net.weight]["exp_avg_sq"].dtype == torch.float32


def test_short_names_on_the_command_line_are_torchs():
    """jsonargparse looks a short name up among all subclasses of torch.optim.Optimizer that are imported."""
    cli = command_line("--optimizer=torch.optim.AdamW")
    assert cli.config.optimizer.class_path == "torch.optim.AdamW"
    for name in ("AdamW", "Adam", "SGD"):  # transformers, which other tests import, has an Adafactor
        assert command_line(f"--optimizer={name}").config.optimizer.class_path == f"torch.optim.{name}"
    assert command_line("--optimizer=subulp.AdamW").config.optimizer.class_path == "subulp.AdamW"
    assert command_line("--optimizer=RMSprop").config.optimizer.class_path.startswith("torch.optim.")
    assert command_line("--optimizer=Lion").config.optimizer.class_path == "subulp.Lion"


def test_the_command_line_reads_the_same_from_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "optimizer:\n  class_path: subulp.SGD\n  init_args: {lr: 0.01, momentum: 0.9, weight_residual: null}\n"
    )
    cli = command_line(f"--config={file}", f"--trainer.default_root_dir={tmp_path}")
    cli.trainer.fit(cli.model, data())
    assert type(cli.trainer.optimizers[0]) is subulp.SGD
