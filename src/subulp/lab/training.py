"""Trains the variants side by side on the same batches, and measures them at the same steps.

Each run keeps its stored tensors and an fp32 working copy of the model. A step computes the gradients of the working
copy in fp32, stores them in the variant's dtype, lets the optimizer update the stored weights, and copies these back.
So the runs differ in what is stored and how it is rounded, and in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from subulp.lab.tiny_lm import Text, TinyLM, mean_loss, training_starts, validation_loss, windows
from subulp.lab.variants import BETAS, EPS, WEIGHT_DECAY, Named, Variant

PEAK_LR = 1e-3
FINAL_LR = 1e-5
WARMUP = 100


@dataclass(frozen=True)
class Plan:
    """How long to train, from which seed, and how often to measure."""

    steps: int
    seed: int
    measures: int
    """Number of measures, evenly spaced, the last one after the last step (fewer if there are fewer steps)."""
    validation_sequences: int

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from PEAK_LR at step 0 to FINAL_LR at the last step; steps count from 1."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return min(1.0, step / min(WARMUP, self.steps)) * (FINAL_LR + (PEAK_LR - FINAL_LR) * cosine)

    def measured_steps(self) -> set[int]:
        """The steps after which the runs are measured."""
        count = min(self.measures, self.steps)
        return {self.steps * (i + 1) // count for i in range(count)}


@dataclass(frozen=True)
class Measure:
    """What was seen at one step of one run."""

    step: int
    validation_loss: float
    second_moment: float
    """Mean of exp_avg_sq over all elements."""
    exact_second_moment: float
    """The same for the fp32 moving average of the squares of this very run's gradients."""
    lost_share: float
    """Share of this step's nonzero updates that rounding a bf16 weight to nearest would lose."""


class Run:
    """One variant: its stored tensors, its optimizer, and what was measured so far."""

    def __init__(self, variant: Variant, text: Text, plan: Plan) -> None:
        self.variant = variant
        self.steps_done = 0
        self.measures: list[Measure] = []
        self._text = text
        self._plan = plan
        self._measured = plan.measured_steps()
        self._model = TinyLM(text.vocabulary, plan.seed)
        # Every variant starts from the same weights: bf16 values, whatever they are stored in.
        self.weights: Named = [
            (name, p.detach().bfloat16().to(variant.dtype).requires_grad_())
            for name, p in self._model.named_parameters()
        ]
        self._optimizer = variant.make_optimizer(self.weights, plan.seed)
        self._exact_squares = torch.zeros(sum(w.numel() for _, w in self.weights))
        self._load_weights()

    def train(self, starts: Tensor, stop: Event) -> None:
        """All steps, from the windows that begin at ``starts`` (steps, BATCH); ends early once ``stop`` is set."""
        for step in range(1, self._plan.steps + 1):
            if stop.is_set():
                return
            lr = self._plan.learning_rate(step)
            self._store_gradients(*windows(self._text.train, starts[step - 1]))
            lost = self._lost_share(lr, step) if step in self._measured else math.nan
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
            self._load_weights()
            if step in self._measured:
                loss = validation_loss(self._model, self._text, self._plan.validation_sequences)
                exact = float(self._exact_squares.double().mean())
                self.measures.append(Measure(step, loss, self._second_moment(), exact, lost))
            self.steps_done = step

    def bytes_per_parameter(self) -> float:
        """Bytes of the stored weights, their gradients and the optimizer's state, for each weight."""
        tensors = [t for _, w in self.weights for t in (w, w.grad, *self._optimizer.state[w].values())]
        total = sum(t.nbytes for t in tensors if isinstance(t, Tensor))
        return total / sum(w.numel() for _, w in self.weights)

    def _store_gradients(self, inputs: Tensor, targets: Tensor) -> None:
        gradients = torch.autograd.grad(mean_loss(self._model, inputs, targets), list(self._model.parameters()))
        for (_, w), gradient in zip(self.weights, gradients, strict=True):
            w.grad = gradient.to(w.dtype)
        stored = torch.cat([w.grad.flatten().float() for _, w in self.weights if w.grad is not None])
        self._exact_squares.mul_(BETAS[1]).addcmul_(stored, stored, value=1 - BETAS[1])

    @torch.no_grad()
    def _load_weights(self) -> None:
        for (_, w), p in zip(self.weights, self._model.parameters(), strict=True):
            p.copy_(w)

    def _second_moment(self) -> float:
        moments = [self._optimizer.state[w]["exp_avg_sq"].double() for _, w in self.weights]
        return float(torch.cat([v.flatten() for v in moments]).mean())

    @torch.no_grad()
    def _lost_share(self, lr: float, step: int) -> float:
        """The share of the coming step's nonzero updates, computed in fp64, that a bf16 weight would lose."""
        lost = nonzero = 0
        for _, w in self.weights:
            state = self._optimizer.state[w]
            g, m, v = (
                torch.zeros_like(w) if t is None else t.double()
                for t in (w.grad, state.get("exp_avg"), state.get("exp_avg_sq"))
            )
            update = adamw_update(w.double(), g, m, v, lr, step)
            lost += int(is_lost(w, update).sum())
            nonzero += int((update != 0).sum())
        return lost / max(nonzero, 1)


def is_lost(w: Tensor, update: Tensor) -> Tensor:
    """Where a nonzero update is under half an ulp, so that the bf16 weight plus it rounds back to the weight."""
    stored = w.bfloat16()
    return ((stored.double() + update).bfloat16() == stored) & (update != 0)


def adamw_update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, step: int) -> Tensor:
    """What AdamW adds to the weight ``w`` at this step (1 for the first), given gradient and moments before it."""
    beta1, beta2 = BETAS
    m = (beta1 * m + (1 - beta1) * g) / (1 - beta1**step)
    v = (beta2 * v + (1 - beta2) * g * g) / (1 - beta2**step)
    return -lr * (WEIGHT_DECAY * w + m / (v.sqrt() + EPS))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Runs torch's operations on the calling thread alone: the tensors are small, and the runs have a thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_all(runs: Sequence[Run], text: Text, plan: Plan, watch: Callable[[], None], every: float = 0.25) -> None:
    """Trains all runs, a thread each, calling ``watch`` every so many seconds. An exception in one ends the others."""
    starts = training_starts(text, plan.steps, plan.seed)
    stop = Event()
    with one_torch_thread(), ThreadPoolExecutor(len(runs), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(run.train, starts, stop) for run in runs}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=every, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                watch()
        finally:
            stop.set()
