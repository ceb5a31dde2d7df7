"""A small byte-level language model and a real English text that every Python has: the topics of its own help()."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
BATCH = 8
WIDTH = 64
LAYERS = 2
HEADS = 4


@dataclass(frozen=True)
class Text:
    """Byte codes, int64, in 0 .. vocabulary - 1: the first nine tenths to train on, the rest to validate."""

    train: Tensor
    validation: Tensor
    vocabulary: int
    size: int
    digest: str
    """Start of the SHA-256 of the text, which differs between Python versions."""


def load_text() -> Text:
    """The help topics in alphabetical order, each paragraph once: several topics repeat whole sections of others."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    data = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    used = sorted(set(data))
    codes = torch.tensor([used.index(byte) for byte in data])
    cut = len(data) * 9 // 10
    return Text(codes[:cut], codes[cut:], len(used), len(data), hashlib.sha256(data).hexdigest()[:16])


def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets (the next byte), each of shape (len(starts), CONTEXT)."""
    rows = codes[starts[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def training_starts(text: Text, steps: int, seed: int) -> Tensor:
    """Where the windows of each training step begin: shape (steps, BATCH), random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(text.train) - CONTEXT, (steps, BATCH), generator=generator)


class Block(nn.Module):
    """Causal self-attention and a ReLU layer, each after an RMS norm and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        x = x + self.down(functional.relu(self.up(self.norm2(x))))
        return x


class TinyLM(nn.Module):
    """A pre-norm transformer with learned positions; the embedding is also the output layer.

    Maps byte codes (batch, length <= CONTEXT), int64, to logits (batch, length, vocabulary), fp32.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, WIDTH)
            self.position = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02 if name in _TABLES else p.shape[1] ** -0.5)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.position.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = functional.linear(self.norm(x), self.embedding.weight)
        return logits


_TABLES = ("embedding.weight", "position.weight")


def mean_loss(model: TinyLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: TinyLM, text: Text, sequences: int) -> float:
    """Mean loss over the first ``sequences`` windows of the validation text (fewer if it is shorter), side by side."""
    starts = torch.arange(0, len(text.validation) - CONTEXT, CONTEXT)[:sequences]
    total = 0.0
    for part in torch.split(starts, 64):
        total += mean_loss(model, *windows(text.validation, part)).item() * len(part)
    return total / len(starts)
