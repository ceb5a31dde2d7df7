"""The adapter in a small trainer that makes OneTrainer's calls: groups, hooks, clipping, accumulation, backups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subulp
from tests.bits import same_bits
from tests.models import generator
from tests.packages import load_example

adapter = load_example("onetrainer/adapter.py")


class Net(nn.Module):
    """bf16 weights, an fp32 LoRA beside them, an fp16 part, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = nn.Linear(8, 8).bfloat16()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.embedding = nn.Parameter(torch.zeros(8, dtype=torch.float16))
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.bfloat16), requires_grad=False)
        with torch.no_grad():
            g = generator(1)
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.unet(x.bfloat16()).float() + self.up(self.down(x)) + self.embedding.float())
        return (h * self.frozen.float() - 1).square().mean()

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"name": "unet", "params": list(self.unet.parameters()), "lr": 1e-2, "initial_lr": 1e-2},
            {"name": "lora", "params": [self.down.weight, self.up.weight], "lr": 1e-2, "initial_lr": 1e-2},
            {"name": "embedding", "params": [self.embedding], "lr": 1e-2, "initial_lr": 1e-2},
        ]


class Trainer:
    """What OneTrainer's trainer does with the optimizer, with or without its fused back pass."""

    def __init__(self, config: dict[str, Any], *, fused: bool, backup: Any = None, accumulation: int = 1) -> None:
        self.net = Net()
        if backup is not None:
            self.net.load_state_dict(backup["model"])
        self.optimizer = adapter.create_optimizer(self.net.groups(), config, backup and backup["optimizer"])
        self.name = config["optimizer"]
        self.accumulation = accumulation
        self.micro_step = 0
        self.ema = subulp.EMA(self.net.named_parameters(), decay=0.9)
        if backup is not None:
            self.ema.load_state_dict(backup["ema"])
        self.fused = fused
        if fused:
            assert self.optimizer.supports_fused_back_pass
            for group in self.optimizer.param_groups:
                for i, p in enumerate(group["params"]):
                    if p.requires_grad:
                        p.register_post_accumulate_grad_hook(lambda t, group=group, i=i: self.hook(t, group, i))

    @property
    def is_update(self) -> bool:
        return self.micro_step % self.accumulation == self.accumulation - 1

    def hook(self, tensor: Tensor, group: dict[str, Any], i: int) -> None:
        if self.is_update:
            torch.nn.utils.clip_grad_norm_(tensor, 1.0)
            self.optimizer.step_parameter(tensor, group, i)
            tensor.grad = None

    def train(self, steps: int, start: int = 0) -> None:
        for step in range(start, start + steps):
            for part in range(self.accumulation):
                x = torch.randn(4, 8, generator=generator(100 * step + part))
                (self.net(x) / self.accumulation).backward()
                if self.is_update:
                    if not self.fused:
                        for group in self.optimizer.param_groups:
                            for p in group["params"]:
                                torch.nn.utils.clip_grad_norm_(p, 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    self.ema.step(self.net.parameters(), step)
                    for p in self.net.unet.parameters():  # layer offload re-points the weights
                        p.data = p.data.clone()
                self.micro_step += 1

    def backup(self) -> dict[str, Any]:
        names = ["unet", "lora", "embedding"]
        state = {**self.optimizer.state_dict(), "param_group_mapping": names}
        state["param_group_optimizer_mapping"] = [self.name.rpartition(".")[2] for _ in names]
        return {"model": self.net.state_dict(), "optimizer": state, "ema": self.ema.state_dict()}


CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "ADAM", "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "fused": True},
    {"optimizer": "Optimizer.ADAMW", "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "stochastic_rounding": True},
    {"optimizer": "ADAFACTOR", "relative_step": False, "scale_parameter": False, "eps": 1e-30, "eps2": 1e-3},
    {
        "optimizer": "CAME",
        "beta1": 0.9,
        "beta2": 0.99,
        "beta3": 0.999,
        "eps": 1e-30,
        "eps2": 1e-16,
        "weight_decay": 0.01,
    },
    {"optimizer": "LION", "beta1": 0.9, "beta2": 0.99},
    {"optimizer": "SGD", "momentum": 0.9},
    {"optimizer": "PRODIGY", "d0": 1e-3, "slice_p": 3},
]
all_configs = pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=c["optimizer"], marks=() if c["optimizer"].endswith("ADAMW") else pytest.mark.slow)
        for c in CONFIGS
    ],
)


def check_equal(a: Trainer, b: Trainer) -> None:
    assert all(map(same_bits, a.ema.ema_parameters, b.ema.ema_parameters))
    for (name, p), q in zip(a.net.named_parameters(), b.net.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name


@all_configs
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fused_back_pass_trains_to_the_same_bits(config, accumulation):
    fused, plain = (Trainer(config, fused=f, accumulation=accumulation) for f in (True, False))
    x = torch.randn(64, 8, generator=generator(7))
    before = float(fused.net(x).detach())
    frozen = fused.net.frozen.detach().clone()
    for trainer in (fused, plain):
        trainer.train(6)
    check_equal(fused, plain)
    assert float(fused.net(x).detach()) < before
    assert same_bits(fused.net.frozen.detach(), frozen)
    assert fused.net.frozen not in fused.optimizer.state
    assert fused.optimizer.param_groups[1]["name"] == "lora"


@all_configs
def test_a_backup_resumes_bit_for_bit(config, tmp_path):
    whole, first = Trainer(config, fused=True), Trainer(config, fused=True)
    whole.train(8)
    first.train(4)
    torch.save(first.backup(), tmp_path / "backup.pt")
    resumed = Trainer(config, fused=True, backup=torch.load(tmp_path / "backup.pt", weights_only=True))
    resumed.train(4, start=4)
    check_equal(whole, resumed)


def test_ranks_whose_hooks_run_in_another_order_stay_equal():
    """OneTrainer reduces gradients by hand and steps parameters as they arrive, so that the order differs between ranks."""
    trainers = [Trainer(CONFIGS[1], fused=False) for _ in range(2)]
    for step in range(4):
        for trainer, order in zip(trainers, (1, -1), strict=True):
            trainer.net(torch.randn(4, 8, generator=generator(step))).backward()
            work = [(p, g, i) for g in trainer.optimizer.param_groups for i, p in enumerate(g["params"])]
            for p, group, i in work[::order]:
                trainer.optimizer.step_parameter(p, group, i)
                p.grad = None
    check_equal(*trainers)


def test_torchs_backups_load_and_new_settings_win(caplog):
    net = Net()
    other = torch.optim.AdamW(net.groups(), betas=(0.5, 0.6))
    net(torch.randn(4, 8, generator=generator(0))).backward()
    other.step()
    groups = net.groups()
    groups[0]["lr"] = 5e-5
    with caplog.at_level("WARNING"):
        optimizer = adapter.create_optimizer(groups, CONFIGS[1], other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 5e-5
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert same_bits(optimizer.state[net.unet.weight]["exp_avg"], other.state[net.unet.weight]["exp_avg"])
    assert "exp_avg_sq was rounded to nearest" in caplog.text


def test_relative_step_and_unknown_names():
    net = Net()
    optimizer = adapter.create_optimizer(net.groups(), {"optimizer": "ADAFACTOR"})
    assert isinstance(optimizer, subulp.Adafactor)
    with pytest.raises(ValueError, match=r"'ADAMV'.*ADAMW"):
        adapter.create_optimizer(net.groups(), {"optimizer": "ADAMV"})
