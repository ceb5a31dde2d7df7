"""transformers' Trainer and Accelerate, the real packages, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import subulp
from tests.bits import same_bits
from tests.models import generator
from tests.packages import huggingface
from tests.trainers.tiny_gpt2 import tiny_gpt2

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

pytestmark = huggingface


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random start: a model learns them quickly."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start = int(torch.randint(0, 16, (), generator=generator(i)))
        ids = (torch.arange(12) + start) % 16
        return {"input_ids": ids, "labels": ids.clone()}


def trainer(folder: Path, steps: int, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs={},
        save_steps=10,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **more,
    )
    return transformers.Trainer(
        model=tiny_gpt2(),
        args=arguments,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(subulp.AdamW, {"lr": 1e-3, "betas": (0.9, 0.99)}),
    )


def test_trainer_trains_a_bf16_model_with_decay_groups_and_clipping(tmp_path):
    t = trainer(tmp_path, 40, max_grad_norm=1.0, gradient_accumulation_steps=2)
    t.train()
    losses = [entry["loss"] for entry in t.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    optimizer = t.optimizer.optimizer if hasattr(t.optimizer, "optimizer") else t.optimizer
    assert isinstance(optimizer, subulp.AdamW)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.01]
    p = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.bfloat16
    assert float(optimizer.state[p]["step"]) == 40


def test_trainer_resumes_bit_for_bit(tmp_path):
    whole = trainer(tmp_path / "whole", 20)
    whole.train()
    resumed = trainer(tmp_path / "resumed", 20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    for (name, p), q in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name


@pytest.mark.parametrize("cls", [subulp.AdamW, subulp.Adafactor, subulp.Lion])
def test_accelerate_prepares_steps_and_saves(cls, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = tiny_gpt2()
    options = {} if cls is subulp.Adafactor else {"lr": 1e-3}
    opt = cls(net.parameters(), **options)
    data = torch.utils.data.DataLoader(Tokens(), batch_size=8)
    net, opt, data = accelerator.prepare(net, opt, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    before = [p.detach().clone() for p in net.parameters()]
    state = {k: v.clone() for k, v in opt.state[next(net.parameters())].items() if isinstance(v, torch.Tensor)}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    accelerator.load_state(str(tmp_path))
    assert all(same_bits(p.detach(), q) for p, q in zip(net.parameters(), before, strict=True))
    for name, value in state.items():
        assert torch.equal(opt.state[next(net.parameters())][name], value), name
