"""How fast a run is and how much memory it takes, by its own measurement.

Nothing here waits for the device within a step. On CUDA a pair of events brackets each step, and all are read together
when the loop stops to log anyway. On a CPU operators are done when they return, so the clock is read.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.planner import Prediction
from penstock.planner.describe import describe
from penstock.step.memory import step_with_memory
from penstock.step.train_step import StepResult, TrainStep
from penstock.tasks.task import Fullness


class Useful(NamedTuple):
    """Size of a sample of mean length, without padding."""

    tokens: int
    """Tokens of all of the model's stacks."""
    flops: float
    """FLOPs of one forward and backward pass."""


def useful_work(full: Fullness) -> Useful:
    """The size of a mean sample of such batches, without padding."""
    lengths = (max(1, round(full.real * source.length)) for source in full.model.graph.inputs)
    model: ModelConfig = full.model.with_lengths(*lengths)
    return Useful(
        sum(model.graph.lengths), describe(model, Plan(micro_batch=1), words=full.words).model_flops
    )


class Speedometer:
    """The speed of the steps since the last log, and of all of them.

    `start()` opens a window, `lap()` ends a step, `read()` closes the window. Time between `read` and `start`
    (evaluation, saving) belongs to no step. `waited` returns the total seconds that the loop has waited for data.

    FLOPs are those the planner counts: of one sample forward and backward, and with what the hardware computes twice,
    which `prediction` reports. Attention counts in full, also where a causal mask hides half of it. For text
    `sample` defines what a token counts, and padding counts nothing.
    """

    def __init__(
        self,
        prediction: Prediction,
        machine: Machine,
        device: torch.device,
        waited: Callable[[], float],
        sample: Useful | None = None,
    ) -> None:
        plan = prediction.plan
        self.peak = f"{machine.name} {prediction.peak_name}, {machine.source}"
        """The peak that utilisation is measured against: machine, type, datasheet or measured."""
        self.times: list[float] = []
        """Seconds of every step that has been read."""
        self._samples_per_step = plan.global_batch
        self._tokens_per_step = plan.global_batch * sample.tokens if sample else 0
        self._data_world = plan.dp
        self._tokens: list[int] = []
        """Tokens of this rank: of every step that has been read, and then of those since."""
        predicted = prediction.model_flops_per_second_per_gpu * plan.gpus / prediction.samples_per_second
        self._model_flops = sample.flops if sample else predicted
        self._hardware_flops = self._model_flops * prediction.hfu / prediction.mfu
        self._peak_flops = prediction.peak_flops * plan.gpus
        self._cuda = device.type == "cuda"
        self._waited = waited
        self._waited_before = 0.0
        self._waits = 0.0
        self._marks: list[Any] = []

    def start(self) -> None:
        """The first step after a log, or after an evaluation or a save, begins."""
        self._waited_before = self._waited()
        self._marks = [self._mark()]

    def lap(self, tokens: int = 0) -> None:
        """A step of `tokens` tokens on this rank ends. On CUDA this records an event and does not wait."""
        self._marks.append(self._mark())
        self._tokens.append(tokens)

    def read(self) -> dict[str, float]:
        """The `speed` of the steps since `start`. On CUDA this waits for the last one."""
        marks, self._marks = self._marks, []
        if self._cuda and marks:
            marks[-1].synchronize()
            times = [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]
        else:
            times = [later - earlier for earlier, later in pairwise(marks)]
        waited = self._waited() - self._waited_before
        self.times += times
        self._waits += waited
        return self.speed(times, waited, self._tokens[-len(times) :])

    def whole_run(self) -> dict[str, float]:
        """The `speed` of all steps but the first ones, which compile, allocate and choose kernels."""
        if not self.times:
            return {}
        first = min(5, len(self.times) // 2)
        settled = self.times[first:]
        waits = self._waits * sum(settled) / sum(self.times)
        return self.speed(settled, waits, self._tokens[first : len(self.times)])

    def speed(
        self, times: Sequence[float], wait_seconds: float, tokens: Sequence[int] = ()
    ) -> dict[str, float]:
        """Rates over steps of these `times` and `tokens`; times in seconds, rates per second, shares in [0, 1]."""
        total = sum(times)
        if total <= 0:
            return {}
        rate = len(times) * self._samples_per_step / total
        token_count = sum(tokens) * self._data_world  # as if every rank's samples were as long as this one's
        text = {"tokens_per_second": token_count / total} if token_count else {}
        full = rate
        if token_count and self._tokens_per_step:
            full *= token_count / (len(times) * self._tokens_per_step)
        return {
            "samples_per_second": rate,
            **text,
            "step_seconds_median": statistics.median(times),
            "step_seconds_p95": sorted(times)[math.ceil(0.95 * len(times)) - 1],
            "data_wait_share": min(wait_seconds / total, 1.0),
            "model_flops_per_second": full * self._model_flops,
            "mfu": full * self._model_flops / self._peak_flops,
            "hfu": full * self._hardware_flops / self._peak_flops,
        }

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event_type: Any = torch.cuda.Event  # untyped in torch
        event = event_type(enable_timing=True)
        event.record()
        return event


class MemoryMeter:
    """How much memory training takes, counted as predictions count it: in tensors.

    A GPU's allocator knows the most of all steps. On a CPU one step is taken under a profiler: the second, because the
    first one makes the optimizer's state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._counted = 0

    def step(self, step: TrainStep, batches: Sequence[Any]) -> StepResult:
        """Take a step; the second one on a CPU is counted."""
        self._steps += 1
        if self._device.type != "cpu" or self._steps != 2:
            return step(batches)
        result, self._counted = step_with_memory(step, batches)
        return result

    def read(self) -> dict[str, Any]:
        """Bytes, and what they are of: tensors, or the whole process where a CPU took a single step."""
        if self._device.type == "cuda":
            return {"memory_bytes": peak_memory(self._device), "memory_kind": "allocated at most"}
        if not self._counted:
            return {"memory_bytes": peak_memory(self._device), "memory_kind": "the whole process"}
        return {"memory_bytes": self._counted, "memory_kind": "of tensors"}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, or that the whole process occupied."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
