"""Times of steps and of a copy, on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn import Parameter

from subulp.lab.bench.workloads import WORKLOADS, Workload
from subulp.lab.gpu.peers import PEERS
from subulp.lab.gpu.setting import BF16, Setting

BIG, SMALL = "1 B", "small"
BYTES_WHILE_TIMED = 16
"""Of a parameter: weight, gradient and both moments in bf16, and as much again for temporaries of foreach."""


def workloads(setting: Setting) -> list[Workload]:
    """1 B parameters in big tensors, 2000 small tensors, as many layers of a 7 B model as the memory holds."""
    if setting.rehearsal:
        return [
            Workload(BIG, "one tensor", ((64, 32),)),
            Workload(SMALL, "small tensors", ((32,),) * 4),
            Workload("7 B", "a layer", ((16, 8), (8,))),
        ]
    return [
        Workload(BIG, "15 x 8192x8192", ((8192, 8192),) * 15),
        Workload(SMALL, WORKLOADS["small"].description, WORKLOADS["small"].shapes),
        llama_like(setting.free_memory()),
    ]


def llama_like(free_memory: float) -> Workload:
    """The shapes of Llama 7 B, with as many of its 32 layers as four fifths of the memory hold, one at least."""
    width, inner, vocabulary = 4096, 11008, 32000
    ends = ((vocabulary, width), (vocabulary, width), (width,))
    layer = ((width, width),) * 4 + ((inner, width),) * 2 + ((width, inner), (width,), (width,))
    ends_elements, layer_elements = (sum(map(math.prod, shapes)) for shapes in (ends, layer))
    room = 0.8 * free_memory / BYTES_WHILE_TIMED - ends_elements
    layers = max(1, min(32, int(room // layer_elements)))
    return Workload("7 B", f"{layers} of 32 layers of Llama 7 B", ends + layer * layers)


def time_peer(setting: Setting, name: str) -> dict[str, list[float]]:
    """(parameters, seconds a step) of one optimizer, by workload."""
    peer, results = PEERS[name], {}
    for workload in workloads(setting):
        if peer.serves(workload):
            results[workload.name] = [float(workload.elements), _seconds_per_step(setting, peer.make, workload)]
            setting.release()
    return results


def _seconds_per_step(setting: Setting, make: Callable[[list[Any], str], Any], workload: Workload) -> float:
    params = [Parameter(torch.full(shape, 0.5, dtype=BF16, device=setting.device)) for shape in workload.shapes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = make(params, setting.backend)
    for _ in range(1 if setting.rehearsal else 3):
        optimizer.step()
    return seconds_of(setting, optimizer.step, 1 if setting.rehearsal else 5)


def seconds_of(setting: Setting, call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, its work on the device included, over groups of ``repeats`` that share one wait."""
    times = []
    for _ in range(1 if setting.rehearsal else 5):
        setting.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        setting.synchronize()
        times.append((time.perf_counter() - begin) / repeats)
    return median(times)


def copy_bandwidth(setting: Setting) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB on the device."""
    source = torch.empty(1 << (10 if setting.rehearsal else 30), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(setting, lambda: target.copy_(source), 1 if setting.rehearsal else 20)
