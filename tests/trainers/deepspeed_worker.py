"""One process of a DeepSpeed job on the CPU: ``python -m tests.trainers.deepspeed_worker STAGE MASTER DIRECTORY``.

Rank and size come from the environment, as under DeepSpeed's launcher. ``MASTER`` is ``bf16`` or ``fp32``: the dtype of
the master weights. It trains, saves, resumes in a new engine, and writes what it saw to ``DIRECTORY/rank.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import deepspeed
import torch

import subulp
from tests.models import generator

RANK = int(os.environ["RANK"])
STEPS = 8
SMALL_LR, SMALL_STEPS, SMALL_SIZE = 1e-4, 50, 64


def engine_of(net: torch.nn.Module, opt: torch.optim.Optimizer, stage: int, master: str) -> Any:
    bf16: dict[str, Any] = {"enabled": True}
    if master == "bf16":
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": bf16,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=net, optimizer=opt, config=config)[0]


def new_engine(stage: int, master: str) -> tuple[Any, subulp.AdamW]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))
    groups = [
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in net.parameters() if p.dim() == 2]},
    ]
    opt = subulp.AdamW(groups, lr=1e-2, weight_decay=0.1)
    return engine_of(net, opt, stage, master), opt


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(8, 16, generator=generator(2 * (step % 2) + RANK))
        loss = (engine(x.bfloat16()).float() - x[:, :5]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def masters(opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in opt.state]  # ZeRO 3 empties the groups between steps


def small_steps(stage: int, master: str) -> torch.Tensor:
    """Weights of 1 under a gradient of 1: each step wants to move them by far less than half an ulp."""
    net = torch.nn.Linear(SMALL_SIZE, SMALL_SIZE, bias=False)
    torch.nn.init.ones_(net.weight)
    engine = engine_of(net, subulp.AdamW(net.parameters(), lr=SMALL_LR, weight_decay=0.0), stage, master)
    for _ in range(SMALL_STEPS):
        engine.backward(engine(torch.ones(1, SMALL_SIZE).bfloat16()).float().sum())
        engine.step()
    return net.weight.detach().float()


def main(stage: int, master: str, directory: Path) -> None:
    deepspeed.init_distributed()
    engine, opt = new_engine(stage, master)
    losses = train(engine, 0, STEPS)
    engine.save_checkpoint(str(directory / "checkpoint"))
    losses += train(engine, STEPS, 2 * STEPS)
    resumed, resumed_opt = new_engine(stage, master)
    resumed.load_checkpoint(str(directory / "checkpoint"))
    train(resumed, STEPS, 2 * STEPS)
    seen = {
        "losses": losses,
        "steps": [float(s["step"]) for s in opt.state.values()],
        "dtypes": [s["exp_avg_sq"].dtype for s in opt.state.values()],
        "masters": masters(opt),
        "resumed": masters(resumed_opt),
        "weights": [p.detach().clone() for p in engine.module.parameters()] if stage < 3 else [],
        "small": small_steps(stage, master) if stage < 3 else None,
    }
    torch.save(seen, directory / f"{RANK}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
