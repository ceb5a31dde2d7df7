"""Cases of tests/recorded_bits.py beside the optimizers: the rounding functions, averages, gradient accumulation.

They take the backend that serves their tensors, and an operand in fp64 is served by the eager one alone: there each case has
its operands in fp64, which holds them exactly. Accumulation has no such operand and runs on the CPU's fastest backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import subulp
from tests.recorded_inputs import BIG_SEED, every, numbers, some, special

Named = Iterator[tuple[str, Tensor]]

LOW = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
ALL = {**LOW, "fp32": torch.float32}

COUNTERS: list[dict[str, int]] = [
    {"seed": 0},
    {"seed": BIG_SEED, "stream": 2**62 + 12345, "step": 2**32 - 1, "offset": 7},
    {"seed": 1, "stream": 3, "step": 2, "offset": 2**33 - 5},
]


def _operand(t: Tensor, backend: str) -> Tensor:
    return t.double() if backend == "eager" else t


def _round(source: Tensor, dtype: torch.dtype) -> Callable[[str], Named]:
    def case(backend: str) -> Named:
        for i, counters in enumerate(COUNTERS):
            yield f"{i}", subulp.round_stochastic(_operand(source, backend), dtype, **counters)

    return case


def _round_strided(dtype: torch.dtype) -> Callable[[str], Named]:
    def case(backend: str) -> Named:
        x = _operand(numbers((7, 5, 6), 11, torch.float32), backend)
        for name, view in (
            ("transposed", x.permute(2, 0, 1)),
            ("steps", x[:, 1::2]),
            ("expanded", x[:1].expand(3, 5, 6)),
        ):
            yield name, subulp.round_stochastic(view, dtype, seed=5, stream=9, step=1)
        large = _operand(numbers((517, 513), 12, torch.float32).t(), backend)
        yield "large", subulp.round_stochastic(large, dtype, seed=5, stream=10, step=1)
        target = torch.zeros(5, 7, dtype=dtype).t()
        yield "copy", subulp.copy_stochastic_(target, _operand(x[:, :, 0], backend), seed=6, stream=1)

    return case


def _arithmetic(dtype: torch.dtype, operands: torch.dtype) -> Callable[[str], Named]:
    """Special values meet ordinary ones, and ordinary ones each other. The sign of a computed NaN is the processor's."""

    def case(backend: str) -> Named:
        for name, t in results(backend):
            x = t.float()
            yield name, torch.where(x.isnan(), torch.nan, x)

    def results(backend: str) -> Named:
        values = some(operands, 8003)
        ordinary = numbers(values.shape, 21, operands)
        start = torch.cat([numbers((4001,), 22, dtype), some(dtype, 4002)])
        others = [_operand(t, backend) for t in (values, ordinary)]
        for i, counters in enumerate(COUNTERS[:2]):
            for alpha in (1.0, -0.3):
                target = start.clone()
                yield f"{i} add {alpha}", subulp.add_stochastic_(target, others[0], alpha=alpha, **counters)
                target = start.clone()
                yield f"{i} lerp {alpha}", subulp.lerp_stochastic_(target, others[0], alpha, **counters)
                target = start.clone()
                yield f"{i} addcdiv {alpha}", subulp.addcdiv_stochastic_(target, *others, value=alpha, **counters)
            yield f"{i} row", subulp.add_stochastic_(start[:35].view(5, 7).clone(), others[1][:7], **counters)

    return case


def _nearest(dtype: torch.dtype) -> Callable[[str], Named]:
    """Rounding to nearest is no function of its own: here a step from zero stores each special value, ties among them."""

    def case(backend: str) -> Named:
        values = special()
        values = values[~values.isnan()]
        p = Parameter(torch.zeros(values.shape, dtype=dtype))
        p.grad_dtype = None
        p.grad = -values
        subulp.SGD([p], lr=1.0, stochastic_rounding=False, backend=backend).step()
        yield "", p.detach()

    return case


def _kept(dtype: torch.dtype) -> Callable[[str], Named]:
    """Weights of every pattern: those that are not finite stay."""

    def case(backend: str) -> Named:
        for stochastic in (True, False):
            p = Parameter(every(dtype))
            opt = subulp.SGD([p], weight_decay=0.1, stochastic_rounding=stochastic, stream=0, backend=backend)
            p.grad = numbers(p.shape, 31, dtype)
            opt.step()
            yield f"{stochastic}", p.detach()

    return case


def _average(dtype: torch.dtype, names: bool, **settings: Any) -> Callable[[str], Named]:
    def case(backend: str) -> Named:
        shapes = [(), (3,), (7, 5), (129,)]
        params = [Parameter(_operand(numbers(shape, i, torch.float32), backend)) for i, shape in enumerate(shapes)]
        items: Any = [(f"module.{i}", p) for i, p in enumerate(params)] if names else params
        ema = subulp.EMA(items, dtype=dtype, stream=0, **settings)
        for step in range(20):
            for i, p in enumerate(params):
                p.data.copy_(numbers(p.shape, 1000 * step + i, torch.float32))
            ema.step(items, step)
        yield from ((f"{i}", t) for i, t in enumerate(ema.ema_parameters))

    return case


def _accumulation(dtype: torch.dtype, names: bool, seed: int) -> Callable[[str], Named]:
    def case(backend: str) -> Named:
        params = [Parameter(numbers(shape, i, dtype)) for i, shape in enumerate([(), (3,), (7, 5), (129,)])]
        items: Any = [(f"module.{i}", p) for i, p in enumerate(params)] if names else params
        accumulation = subulp.GradientAccumulation(items, steps=4, seed=seed, stream=0)
        for step in range(3):
            for part in range(4):
                for i, p in enumerate(params):
                    g = numbers(p.shape, 1000 * step + 10 * part + i, dtype) * 2.0 ** (-3 * part)
                    (p * g).sum().backward()
            for i, p in enumerate(params):
                yield f"{step} {i}", p.grad.clone()
                p.grad = None
        accumulation.remove()

    return case


def _cases() -> Iterator[tuple[str, Callable[[str], Named]]]:
    sources = {"fp32": special, **{name: lambda d=dtype: every(d) for name, dtype in LOW.items()}}
    for target, dtype in ALL.items():
        for name, source in sources.items():
            yield f"round/{name}/{target}", _round(source(), dtype)
        yield f"round/strided/{target}", _round_strided(dtype)
        yield f"arithmetic/fp32/{target}", _arithmetic(dtype, torch.float32)
    yield "nearest/bf16", _nearest(torch.bfloat16)
    yield "nearest/fp16", _nearest(torch.float16)
    yield "kept/bf16", _kept(torch.bfloat16)
    yield "kept/fp16", _kept(torch.float16)
    yield "arithmetic/bf16/bf16", _arithmetic(torch.bfloat16, torch.bfloat16)
    yield "arithmetic/fp16/fp16", _arithmetic(torch.float16, torch.float16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        yield f"EMA/{name}", _average(dtype, names=False)
        yield f"EMA/{name}/named", _average(dtype, names=True, decay=0.7, update_step_interval=3, seed=BIG_SEED)
        yield f"GradientAccumulation/{name}", _accumulation(dtype, names=False, seed=0)
        if dtype != torch.float32:  # which rounds nothing, whatever the stream
            yield f"GradientAccumulation/{name}/named", _accumulation(dtype, names=True, seed=BIG_SEED)


FUNCTIONS = dict(_cases())
