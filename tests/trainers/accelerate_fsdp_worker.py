"""One process of an Accelerate FSDP2 job on the CPU: ``python -m tests.trainers.accelerate_fsdp_worker DIRECTORY [resume]``.

Accelerate turns FSDP on for accelerators only, so that its state is switched by hand; what follows is its own code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.distributed.tensor import DTensor

import subulp
from tests.models import generator
from tests.trainers.tiny_gpt2 import tiny_gpt2

STEPS = 4


def fsdp_accelerator() -> Any:
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(directory: Path, resume: bool) -> None:
    accelerator = fsdp_accelerator()
    net = tiny_gpt2(vocab_size=17, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    net, opt = accelerator.prepare(net, subulp.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1))
    if resume:
        accelerator.load_state(str(directory / "state"))
    losses = []
    for step in range(STEPS if resume else 0, 2 * STEPS):
        if step == STEPS and not resume:
            accelerator.save_state(str(directory / "state"))
        start = torch.randint(0, 16, (8, 1), generator=generator(2 * step + accelerator.process_index))
        ids = (torch.arange(12) + start) % 16
        loss = net(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    states = [opt.state[p]["exp_avg_sq"] for p in net.parameters()]
    seen = {
        "losses": losses,
        "sharded": all(isinstance(t, DTensor) for t in [*net.parameters(), *states]),
        "steps": {float(opt.state[p]["step"]) for p in net.parameters()},
        "tensors": [t.detach().to_local() for t in [*net.parameters(), *states]],
    }
    torch.save(seen, directory / f"{'resumed' if resume else 'whole'}{accelerator.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), len(sys.argv) > 2)
