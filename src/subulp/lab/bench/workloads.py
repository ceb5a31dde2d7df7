"""What the benchmarks step: lists of bf16 tensors, by shape alone, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """A named list of parameter shapes; a sample of its time is the mean of ``repeats`` timed steps."""

    name: str
    description: str
    shapes: Shapes
    repeats: int = 1
    one_group_each: bool = False
    """A parameter group for each tensor, as for rates by layer."""

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes))


def gpt2() -> Shapes:
    """GPT-2 with 124,439,808 parameters (Radford et al. 2019): 12 layers of width 768, output layer tied to the embedding."""
    width, vocabulary, context, layers = 768, 50257, 1024, 12
    norm = ((width,), (width,))
    attention = ((width, 3 * width), (3 * width,), (width, width), (width,))
    mlp = ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    return ((vocabulary, width), (context, width), *(norm + attention + norm + mlp) * layers, *norm)


def vit() -> Shapes:
    """ViT-B/16 with 86,567,656 parameters (Dosovitskiy et al. 2021): 224 x 224 images, 1000 classes."""
    width, patch, tokens, layers, classes = 768, 16, 14 * 14 + 1, 12, 1000
    norm = ((width,), (width,))
    attention = ((3 * width, width), (3 * width,), (width, width), (width,))
    mlp = ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
    embedding = ((1, 1, width), (1, tokens, width), (width, 3, patch, patch), (width,))
    return (*embedding, *(norm + attention + norm + mlp) * layers, *norm, (classes, width), (classes,))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("big", "8 x 4096x1024: memory speed", ((4096, 1024),) * 8),
        Workload("small", "2000 x 1024: many small tensors, as LoRA has", ((1024,),) * 2000),
        Workload("tiny", "one element: the overhead of a call", ((1,),), repeats=20),
        Workload("one-group", "500 x 4096 in one parameter group", ((4096,),) * 500),
        Workload("groups", "500 x 4096, a parameter group each", ((4096,),) * 500, one_group_each=True),
        Workload("gpt2", "GPT-2, 124 M parameters in 148 tensors", gpt2()),
        Workload("vit", "ViT-B/16, 87 M parameters in 152 tensors", vit()),
    )
}


@dataclass(frozen=True)
class Data:
    """Initial weights and one set of gradients, bf16, a function of the shapes and the seed."""

    weights: list[Tensor]
    gradients: list[Tensor]
    one_group_each: bool = False


def make_data(shapes: Sequence[Sequence[int]], seed: int, one_group_each: bool = False) -> Data:
    """Normal weights; gradients of random sign, uniform between 0.005 and 0.02 in magnitude.

    Away from zero, so that no implementation meets subnormal numbers or a denominator near ``eps``, where two that are
    both right may differ.
    """
    generator = torch.Generator().manual_seed(seed)
    weights, gradients = [], []
    for shape in shapes:
        weights.append(torch.randn(tuple(shape), generator=generator).bfloat16())
        uniform = torch.rand(tuple(shape), generator=generator).mul_(2).sub_(1)
        gradients.append(uniform.mul_(0.015).add_(uniform.sign() * 0.005).bfloat16())
    return Data(weights, gradients, one_group_each)
