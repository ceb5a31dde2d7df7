"""Checks subulp on a GPU and measures it: bits, capture, synchronisation, speed. Takes at most four minutes.

    python scripts/gpu_check.py                  # everything
    python scripts/gpu_check.py bits capture     # some sections
    python scripts/gpu_check.py --dry-run        # its own logic, in Triton's interpreter on a CPU, in small

Prints a line for every check and, last, "N passed, N failed". Goals of speed count as checks. What does not fit (memory,
time, a library that is not installed) is said and not counted.
"""

# ruff: noqa: E402  Triton reads its environment variable when it is imported

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor

import subulp
from subulp.backends import eager
from subulp.backends.bucket import Bucket
from subulp.numerics.layout import Layout
from subulp.rules.adamw import PLAIN, scalars_of

TIME_LIMIT = 230.0
BYTES_PER_PARAMETER = 14  # bf16: reads p, g, m, v; writes p, m, v
DEVICE = torch.device("cpu" if DRY else "cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STARTED = time.monotonic()

passed = failed = 0


def report(name: str, good: bool, detail: str = "") -> None:
    global passed, failed
    passed, failed = passed + good, failed + (not good)
    print(f"{'ok  ' if good else 'FAIL'} {name}{': ' if detail else ''}{detail}", flush=True)


def note(text: str) -> None:
    print(f"     {text}", flush=True)


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """A check that raises has failed; the others go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report(name, False, f"{type(error).__name__}: {error}")


def same_bits(a: Tensor, b: Tensor, *, any_nan: bool = False) -> bool:
    """Equal bits. ``any_nan``: a NaN equals a NaN, since devices differ in the one that an invalid operation gives."""
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    if any_nan:
        a, b = (torch.where(t.isnan(), torch.full_like(t, math.nan), t) for t in (a, b))
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


# Bits


SHAPES = [(7,), (8, 9), (129, 5), ()] if DRY else [(7,), (1000,), (4096, 33), (1,), (513, 1025), (64, 3, 5, 5), ()]
STEPS = 2 if DRY else 5


def trained(device: torch.device, backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Parameters and states after a few steps with gradients from a fixed seed."""
    params = [torch.nn.Parameter(normal(shape, i, dtype).to(device)) for i, shape in enumerate(SHAPES)]
    if len(SHAPES) > 5:
        params[5].data = params[5].data.contiguous(memory_format=torch.channels_last)
        wide = torch.empty(params[2].numel() + 1, dtype=dtype, device=device)
        params[2].data = wide[1:].view(params[2].shape).copy_(params[2].data)  # not 16-byte aligned
    optimizer = subulp.AdamW(params, lr=1e-3, weight_decay=0.1, seed=7, backend=backend, stream=0, **options)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        for i, p in enumerate(params):
            p.grad = normal(tuple(p.shape), 100 * step + i, dtype).to(device)
            p.grad = p.grad.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p.grad
        optimizer.step()
    states = [t for p in params for k, t in optimizer.state[p].items() if isinstance(t, Tensor) and k != "step"]
    return [*(p.data for p in params), *states]


def section_bits() -> None:
    cases: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "bf16": (BF16, {}),
        "bf16 amsgrad": (BF16, {"amsgrad": True}),
        "bf16 maximize": (BF16, {"maximize": True}),
        "bf16 nearest": (BF16, {"stochastic_rounding": False}),
        "bf16, fp32 states": (BF16, {"state_dtype": "fp32"}),
        "bf16, fp32 exp_avg_sq": (BF16, {"state_dtype": {"exp_avg_sq": "fp32"}}),
        "fp32, bf16 states": (FP32, {"state_dtype": "bf16"}),
        "fp32": (FP32, {}),
        "fp16": (FP16, {}),
    }
    for name, (dtype, options) in cases.items():
        with guarded(f"bits, {name}"):
            ours = trained(DEVICE, "triton", dtype, **options)
            cpu = trained(torch.device("cpu"), "eager", dtype, **options)
            wrong = sum(not same_bits(a, b) for a, b in zip(ours, cpu, strict=True))
            report(f"bits, {name}", wrong == 0, f"{len(ours)} tensors, {wrong} differ from the CPU's")
    with guarded("bits, special values"):
        from subulp.backends.triton import launch as triton_gpu

        columns = special_columns()
        ours, cpu = [t.to(DEVICE, copy=True) for t in columns], [t.clone() for t in columns]
        with np.errstate(all="ignore"):
            triton_gpu.run(PLAIN, bucket(ours), seed=7, stochastic=True)
            eager.run(PLAIN, bucket(cpu), seed=7, stochastic=True)
        good = all(same_bits(a, b, any_nan=True) for a, b in zip(ours, cpu, strict=True))
        frozen = ~columns[0].isfinite()
        report("bits, special values", good and same_bits(ours[0].cpu()[frozen], columns[0][frozen]))
    with guarded("bits, rounding primitives"):
        x = torch.cat([normal((100,), 3, FP32), torch.tensor([0.0, -0.0, math.inf, -math.inf, 3e38, 1e-45])])
        pairs = [
            (subulp.round_stochastic(x.to(DEVICE), d, seed=1), subulp.round_stochastic(x, d, seed=1))
            for d in (BF16, FP16)
        ]
        report("bits, rounding primitives", all(same_bits(a, b) for a, b in pairs))


def special_columns() -> list[Tensor]:
    values = [0.0, -0.0, 1e-45, 1e-38, 1.0, 1e30, 3.38e38, math.inf, -math.inf, math.nan]
    p, g = (t.reshape(-1).to(BF16) for t in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij"))
    m, v = torch.full_like(p, 1e-3), torch.full_like(p, 1e-5)
    return [t.contiguous().clone() for t in (p, m, v, g)]


def adamw_scalars(lr: Any, step: Any) -> list[Any]:
    return list(PLAIN.ordered(scalars_of({"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, step)))


def bucket(columns: list[Tensor], step: Any = 1, layout: Layout | None = None, scalars: Any = None) -> Bucket:
    rows: Any = np.array([adamw_scalars(1e-3, float(step))]) if scalars is None else scalars
    steps: Any = step.reshape(1) if isinstance(step, Tensor) else np.array([step])
    row = np.zeros(1, dtype=np.int64)
    return Bucket([[t] for t in columns[:3]], [[t] for t in columns[3:]], [layout], [12345], steps, rows, row)


# A fresh process


def digest(tensors: list[Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def first_step(device: torch.device, backend: str) -> str:
    p = torch.nn.Parameter(normal((700,), 1).to(device))
    optimizer = subulp.AdamW([p], lr=1e-3, seed=3, backend=backend, stream=0)
    p.grad = normal((700,), 2).to(device)
    optimizer.step()
    return digest([p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]])


def section_fresh() -> None:
    with guarded("first step of a fresh process"):
        output = child("first-step")
        report("first step of a fresh process", output == first_step(torch.device("cpu"), "eager"))


def child(*arguments: str, timeout: float = 60.0) -> Any:
    """Runs this script for one internal task and returns the JSON it prints last."""
    command = [sys.executable, __file__, *(["--dry-run"] if DRY else []), "--task", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


# A parameter of more than 2**31 elements


def section_large() -> None:
    from subulp.backends.triton import launch as triton_gpu

    size = 5000 if DRY else 2**31 + 1000
    if not DRY and torch.cuda.mem_get_info()[0] < 9 * size:
        note(f"2**31 + 1000 elements: needs {9 * size / 2**30:.0f} GiB of free device memory, not run")
        return
    with guarded("2**31 + 1000 elements"):
        columns = [torch.empty(size, dtype=BF16, device=DEVICE) for _ in range(4)]
        for i, t in enumerate(columns):
            t.normal_(generator=torch.Generator(DEVICE).manual_seed(i)).abs_()
        step, window = 3, 1000
        starts = sorted({0, size // 2 // 8 * 8, max(0, size - window - 1 - window // 2), size - window})
        before = [[t[s : s + window].cpu() for t in columns] for s in starts]
        triton_gpu.run(PLAIN, bucket(columns, step), seed=7, stochastic=True)
        good = True
        for start, expected in zip(starts, before, strict=True):
            eager.run(PLAIN, bucket(expected, step, Layout(start, (window,), (1,))), seed=7, stochastic=True)
            good &= all(same_bits(a[start : start + window], b) for a, b in zip(columns, expected, strict=True))
        report("2**31 + 1000 elements", good, f"{len(starts)} windows of {window} elements against the CPU")
        del columns
        torch.cuda.empty_cache()


# Capture


def section_capture() -> None:
    from subulp.backends.triton import launch as triton_gpu

    columns = [normal((1001,), i).abs() for i in range(4)]
    lr: Tensor
    step: Callable[[], Any]
    with guarded("capture and replay, backend"):
        ours, cpu = [t.to(DEVICE, copy=True) for t in columns], [t.clone() for t in columns]
        counter, lr = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE, dtype=torch.float64)

        def step() -> None:
            counter.add_(1)
            row = [
                s if isinstance(s, Tensor) else torch.full((), s, device=DEVICE, dtype=torch.float64)
                for s in adamw_scalars(lr, counter.double())
            ]
            triton_gpu.run(PLAIN, bucket(ours, counter, scalars=torch.stack(row)[None]), seed=7, stochastic=True)

        lr.fill_(1e-3)
        replay = captured(step)
        for i in range(1, 7):
            rate = 1e-3 if i <= WARM_UPS else 1e-3 / i
            lr.fill_(rate)
            if i > WARM_UPS:
                replay()
            row = np.array([adamw_scalars(rate, float(i))])
            eager.run(PLAIN, bucket(cpu, i, scalars=row), seed=7, stochastic=True)
        good = all(same_bits(a, b) for a, b in zip(ours, cpu, strict=True))
        report("capture and replay, backend", good, "each replay has its own step, learning rate and noise")
    if DRY:
        return
    with guarded("capture and replay, optimizer"):
        results = []
        for device in (DEVICE, torch.device("cpu")):
            p = torch.nn.Parameter(normal((1001,), 1).to(device))
            p.grad = normal((1001,), 2).to(device)
            lr = torch.tensor(1e-3, device=device, dtype=torch.float64)
            optimizer = subulp.AdamW([p], lr=lr, seed=3, capturable=device == DEVICE, stream=0)
            step = captured(optimizer.step) if device == DEVICE else optimizer.step
            for _ in range(6 - WARM_UPS if device == DEVICE else 6):
                step()
            results.append([p.data, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]])
        report("capture and replay, optimizer", all(same_bits(a, b) for a, b in zip(*results, strict=True)))


WARM_UPS = 3


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step as a CUDA graph, after warm-ups; calling the result replays it. In a dry run: the step itself."""
    if DRY:
        for _ in range(WARM_UPS):
            step()
        return step
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# Synchronisation, compilation, devices


def section_sync() -> None:
    params = [torch.nn.Parameter(normal((65, 3), i).to(DEVICE)) for i in range(3 if DRY else 20)]
    optimizer = subulp.AdamW(params, lr=1e-3, backend="triton", stream=0)

    def step(i: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
        for p in params:
            room = torch.ones(p.numel() + 8 * i, dtype=BF16, device=DEVICE)
            p.grad = room[8 * i :].view(p.shape)
        optimizer.step()

    with guarded("no synchronisation"):
        step(0)
        synchronize()
        set_mode = (lambda mode: None) if DRY else torch.cuda.set_sync_debug_mode
        set_mode("error")
        try:
            for i in range(1, 4):
                step(i)
        finally:
            set_mode("default")
        report("no synchronisation", True, "new learning rates and new gradient addresses among the steps")
    with guarded("no recompilation under torch.compile"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        compiled()
        with torch.compiler.set_stance("fail_on_recompile"):
            for i in range(2 if DRY else 20):
                optimizer.param_groups[0]["lr"] = 1e-3 / (i + 2)
                compiled()
        report("no recompilation under torch.compile", True)
    if not DRY and torch.cuda.device_count() > 1:
        with guarded("parameters on two devices"):
            pair = [torch.nn.Parameter(normal((99,), 1).to(f"cuda:{i}")) for i in range(2)]
            both = subulp.AdamW(pair, stream=0)
            for p in pair:
                p.grad = torch.ones_like(p)
            both.step()
            report("parameters on two devices", all(not same_bits(p, normal((99,), 1)) for p in pair))


# Speed


def shape_lists() -> dict[str, list[tuple[int, ...]]]:
    """1 B parameters in big tensors, 2000 small ones, and as many layers of a 7 B model as the memory holds."""
    if DRY:
        return {"big": [(64, 32)], "small": [(32,)] * 4, "7B": [(16, 8), (8,)]}
    width, inner = 4096, 11008
    layer = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    bytes_each = 16  # p, g, m, v and room for the temporaries of foreach
    free = torch.cuda.mem_get_info()[0] * 0.8 - 2 * 32000 * width * bytes_each
    layers = max(1, min(32, int(free / (bytes_each * sum(map(math.prod, layer))))))
    return {"big": [(8192, 8192)] * 15, "small": [(1024,)] * 2000, "7B": [(32000, width)] * 2 + layer * layers}


def peers() -> dict[str, Callable[[list[Any]], Any]]:
    def torchao(params: list[Any]) -> Any:
        from torchao.optim import _AdamW  # type: ignore[import-not-found]

        return _AdamW(params, lr=1e-3, bf16_stochastic_round=True)

    def flashoptim(params: list[Any]) -> Any:
        from flashoptim import FlashAdamW  # type: ignore[import-not-found]

        return FlashAdamW(params, lr=1e-3)

    def heavyball(params: list[Any]) -> Any:
        from heavyball import ForeachAdamW  # type: ignore[import-not-found]

        return ForeachAdamW(params, lr=1e-3)

    return {
        "subulp": lambda params: subulp.AdamW(params, lr=1e-3, backend="triton"),
        "subulp, nearest": lambda params: subulp.AdamW(params, lr=1e-3, backend="triton", stochastic_rounding=False),
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        "torch foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
        "torchao": torchao,
        "flashoptim": flashoptim,
        "heavyball": heavyball,
    }


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, all its work on the device included, over groups that amortise the wait."""
    times = []
    for _ in range(1 if DRY else 5):
        synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        times.append((time.perf_counter() - begin) / repeats)
    return sorted(times)[len(times) // 2]


def timings(peer: str) -> dict[str, list[float]]:
    """(parameters, seconds a step) of one optimizer for each list of shapes."""
    result = {}
    for name, shapes in shape_lists().items():
        params = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=BF16, device=DEVICE)) for shape in shapes]
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        optimizer = peers()[peer](params)
        for _ in range(1 if DRY else 3):
            optimizer.step()
        result[name] = [float(sum(p.numel() for p in params)), seconds_of(optimizer.step, 1 if DRY else 5)]
        del params, optimizer, p
        if not DRY:
            torch.cuda.empty_cache()
    return result


def copy_bandwidth() -> float:
    source = torch.empty(1 << (10 if DRY else 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), 1 if DRY else 20)
    return 2 * source.numel() / seconds


def section_speed() -> None:
    bandwidth = copy_bandwidth()
    note(f"device copy: {bandwidth / 1e9:.0f} GB/s (read + written)")
    measured: dict[str, dict[str, list[float]]] = {}
    for peer in peers():
        left = TIME_LIMIT - (time.monotonic() - STARTED)
        if left < 15:
            note(f"{peer}: no time left, not run")
            continue
        try:
            measured[peer] = child("time", peer, timeout=min(left, 60.0))
        except Exception as error:
            note(f"{peer}: not measured ({str(error)[:150]})")
            continue
        for name, (count, seconds) in measured[peer].items():
            share = BYTES_PER_PARAMETER * count / seconds / bandwidth
            note(f"{peer:16} {name:6} {count / 1e6:8.1f} M  {seconds * 1e3:9.3f} ms  {share:6.1%} of copy at 14 B")
    if "subulp" not in measured or "torch fused" not in measured:
        report("speed", False, "subulp or torch fused could not be measured")
        return
    ours, fused = measured["subulp"], measured["torch fused"]
    count, seconds = ours["big"]
    share = BYTES_PER_PARAMETER * count / seconds / bandwidth
    big, small = seconds / fused["big"][1], ours["small"][1] / fused["small"][1]
    if DRY:
        note("goals: not judged in a dry run")
        return
    report("goal, 1 B parameters: at least 90 % of copy bandwidth", share >= 0.9, f"{share:.1%}")
    report("goal, 1 B parameters: at most 1.05 of torch fused", big <= 1.05, f"{big:.3f}")
    report("goal, 2000 small tensors: at most 1.0 of torch fused", small <= 1.0, f"{small:.3f}")


SECTIONS = {
    "bits": section_bits,
    "fresh": section_fresh,
    "large": section_large,
    "capture": section_capture,
    "sync": section_sync,
    "speed": section_speed,
}

TASKS: dict[str, Callable[..., Any]] = {"first-step": partial(first_step, DEVICE, "triton"), "time": timings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU in Triton's interpreter, judges no speed")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        parser.error("there is no CUDA or ROCm device here; --dry-run runs the script's own logic on a CPU")
    if options.task:
        print(json.dumps(TASKS[options.task[0]](*options.task[1:])))
        return 0
    import triton

    where = "CPU, Triton's interpreter" if DRY else torch.cuda.get_device_name()
    print(f"subulp {subulp.__version__}, torch {torch.__version__}, triton {triton.__version__}, {where}")
    for name in options.sections or SECTIONS:
        if time.monotonic() - STARTED > TIME_LIMIT:
            note(f"section {name}: no time left, not run")
            continue
        SECTIONS[name]()
    print(f"{time.monotonic() - STARTED:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
