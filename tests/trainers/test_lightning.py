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
    whole, first, second = (Module(lr=1e-2) for _ in range(3))
    options = {"precision": "bf16-true"}
    fit(whole, tmp_path / "a", 4, **options, enable_checkpointing=False)
    trainer = fit(first, tmp_path / "b", 2, **options)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(second, tmp_path / "c", 4, checkpoint=tmp_path / "half.ckpt", **options, enable_checkpointing=False)
    for (name, p), q in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert same_bits(p.detach(), q[1].detach()), name
