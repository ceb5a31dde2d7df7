"""Times the steps of several implementations side by side.

A round times one step of each, in an order shuffled anew, so that drifts of the machine meet all alike and every
implementation finds the caches as the others left them. Before each step the gradients are written afresh, untimed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from subulp.lab.bench.candidate import Candidate, renew_gradients
from subulp.lab.bench.correctness import find_fault
from subulp.lab.bench.memory import peak_extra_bytes
from subulp.lab.bench.peers import IMPLEMENTATIONS, Implementation
from subulp.lab.bench.stream import BYTES, make_stream
from subulp.lab.bench.workloads import Data, Workload, make_data

YARDSTICK = "torch-fused"
STREAM = "stream limit"
WARM_UP_ROUNDS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure. ``memory_budget`` bounds the bytes of parameters and states that exist at a time."""

    rounds: int
    threads: int
    seed: int
    memory_budget: int
    peak_memory: bool = True


@dataclass
class Result:
    """The times of one implementation on one workload (ms, one a round), or in ``refusal`` why there are none."""

    name: str
    description: str
    version: str
    bytes_per_parameter: int
    samples: list[float] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    """Each sample divided by the yardstick's of the same round."""
    relative_to_stream: list[float] = field(default_factory=list)
    refusal: str | None = None
    peak_extra: int | str | None = None

    @property
    def median(self) -> float:
        return median(self.samples)

    def gigabytes_per_second(self, elements: int) -> float:
        """Of the bytes that the step must move, whatever it does move."""
        return elements * self.bytes_per_parameter / self.median / 1e6


def measure(workload: Workload, chosen: Sequence[Implementation], settings: Settings, say: Say) -> list[Result]:
    """Times the chosen implementations, the yardstick and the stream; results in the order given, the stream first."""
    data = make_data(workload.shapes, settings.seed, workload.one_group_each)
    gradients = [g.clone() for g in data.gradients]
    if IMPLEMENTATIONS[YARDSTICK] not in chosen:
        chosen = [IMPLEMENTATIONS[YARDSTICK], *chosen]
    results = {i.name: _empty_result(i, workload) for i in chosen}
    with _threads(settings.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        stream = make_stream(workload.elements, settings.threads)
        streamed = Result(STREAM, "reads four arrays, writes three", "", BYTES)
        if stream is None:
            streamed.refusal = "needs numba"
        results[STREAM] = streamed
        order = random.Random(settings.seed)
        yardstick = _prepare(IMPLEMENTATIONS[YARDSTICK], data, gradients, results[YARDSTICK], say)
        for batch in _batches(chosen, workload, settings.memory_budget):
            candidates = [
                _prepare(i, data, gradients, results[i.name], say) for i in batch if results[i.name].refusal is None
            ]
            runners: dict[str, Callable[[], float]] = {
                c.implementation.name: _timed_step(c, data, workload) for c in (yardstick, *candidates) if c is not None
            }
            if stream is not None:
                runners[STREAM] = _timed_stream(stream, workload)
            say(f"{workload.name}: timing {', '.join(runners)}")
            _time_rounds(runners, results, settings.rounds, order)
            del candidates, runners
            gc.collect()
        del yardstick
    if settings.peak_memory:
        for implementation in chosen:
            result = results[implementation.name]
            if result.refusal is None:
                say(f"{workload.name}: memory of {implementation.name}")
                result.peak_extra = peak_extra_bytes(
                    implementation.name, workload.name, settings.threads, settings.seed
                )
    return [results[STREAM], *(results[i.name] for i in chosen)]


def _empty_result(implementation: Implementation, workload: Workload) -> Result:
    obstacle = implementation.obstacle(workload)
    version = "" if obstacle is not None and obstacle.startswith("not installed") else implementation.version()
    return Result(
        implementation.name,
        implementation.description,
        version,
        implementation.bytes_per_parameter,
        refusal=obstacle,
    )


def _batches(
    chosen: Sequence[Implementation], workload: Workload, memory_budget: int
) -> Iterator[list[Implementation]]:
    """Splits what is timed beside the yardstick so that each part fits the budget (or is a single implementation)."""
    # The data, the gradients in use, the yardstick and the stream exist beside every batch.
    left = free = memory_budget - 2 * workload.elements * (2 + 1 + 3 + 4)
    batch: list[Implementation] = []
    for implementation in chosen:
        if implementation.name == YARDSTICK:
            continue
        needed = (
            workload.elements * (implementation.bytes_per_parameter - 2) // 2
        )  # read and written; the gradient is shared
        if batch and needed > left:
            yield batch
            batch, left = [], free
        batch.append(implementation)
        left -= needed
    yield batch


def _prepare(
    implementation: Implementation, data: Data, gradients: list[Tensor], result: Result, say: Say
) -> Candidate | None:
    """A candidate whose first steps were right; else the reason is in ``result``."""
    say(f"{implementation.name}: checking against fp64")
    try:
        candidate = Candidate(implementation, data, gradients)
        result.refusal = find_fault(implementation, candidate.optimizer, candidate.params, data)
    except Exception as error:  # whatever a peer raises is its result
        first, *_ = str(error).strip().splitlines() or [""]
        result.refusal = f"cannot run: {type(error).__name__}: {first}"
    if result.refusal is not None:
        say(f"{implementation.name}: {result.refusal}")
        return None
    return candidate


def _timed_step(candidate: Candidate, data: Data, workload: Workload) -> Callable[[], float]:
    def run() -> float:
        total = 0
        for _ in range(workload.repeats):
            renew_gradients(candidate.params, data.gradients, candidate.gradients)
            start = time.perf_counter_ns()
            candidate.optimizer.step()
            total += time.perf_counter_ns() - start
        return total / workload.repeats / 1e6

    return run


def _timed_stream(stream: Callable[[], None], workload: Workload) -> Callable[[], float]:
    def run() -> float:
        total = 0
        for _ in range(workload.repeats):
            start = time.perf_counter_ns()
            stream()
            total += time.perf_counter_ns() - start
        return total / workload.repeats / 1e6

    return run


def _time_rounds(
    runners: dict[str, Callable[[], float]], results: dict[str, Result], rounds: int, order: random.Random
) -> None:
    names = list(runners)
    gc.collect()
    gc.disable()
    try:
        for turn in range(WARM_UP_ROUNDS + rounds):
            order.shuffle(names)
            times = {name: runners[name]() for name in names}
            if turn < WARM_UP_ROUNDS:
                continue
            for name, value in times.items():
                results[name].samples.append(value)
                if YARDSTICK in times:
                    results[name].relative.append(value / times[YARDSTICK])
                if STREAM in times:
                    results[name].relative_to_stream.append(value / times[STREAM])
    finally:
        gc.enable()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
