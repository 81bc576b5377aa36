"""Meters of a run: its speed and memory, the part of each head in the loss and in the gradients, and the loads of
experts, which are kept in checkpoints and written beside them.

Nothing here waits for the device within a step. On CUDA a pair of events brackets each step, and all are read together
when the loop stops to log anyway. On a CPU operators are done when they return, so the clock is read.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from penstock.boundary.files import own_file, write_text
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.models.experts import MixtureOfExperts
from penstock.models.model import Model
from penstock.parallel import ParallelDims
from penstock.parallel.agree import add_up, average
from penstock.parallel.data import add_up_all
from penstock.planner import Prediction
from penstock.planner.describe import describe
from penstock.planner.loads import LoadRecord, count_sum, imbalance
from penstock.planner.loads_page import loads_page
from penstock.step.memory import step_with_memory
from penstock.step.train_step import StepResult, TrainStep
from penstock.tasks import Task
from penstock.tasks.task import Fullness


class HeadMeter:
    """Gathers on the device; reading it is one transfer, for which all ranks meet."""

    def __init__(self, model: Any, task: Task, dims: ParallelDims, device: torch.device) -> None:
        graph = getattr(model, "graph", None)
        names = [] if graph is None else [head.name for head in graph.heads]
        self.names = [name for name in task.losses if name in names]
        self._places = [task.losses.index(name) for name in self.names]
        self._dims, self._device, self._steps = dims, device, 0
        self._losses = torch.zeros(len(task.losses), device=device)
        self._model = model if self.names and isinstance(model, Model) else None
        if self._model is not None:
            self._model.head_squares = {}

    def add(self, parts: Tensor | None) -> None:
        """Note the parts of a step's loss. Waits for nothing."""
        if parts is not None:
            self._losses += parts.to(self._losses.dtype)
            self._steps += 1

    def read(self) -> dict[str, dict[str, float]]:
        """By head, the mean of its weighted `loss`, and as `gradient` its share of the squares of all gradients that
        heads send back into the model. Forgets them. Waits for the device."""
        if not self.names or not self._steps:
            return {}
        losses = average(self._losses / self._steps, self._dims)
        head_squares = self._losses.new_zeros(len(self.names))
        if self._model is not None:
            squares = self._model.head_squares or {}
            for place, name in enumerate(self.names):
                if name in squares:
                    head_squares[place] = squares[name]
            self._model.head_squares = {}
        head_squares = add_up(head_squares, self._dims)
        if self._dims.pp > 1:  # heads are on the last stage
            distributed.all_reduce(head_squares, group=self._dims.group("pp"))
        shares = head_squares / head_squares.sum().clamp(min=torch.finfo(head_squares.dtype).tiny)
        columns = torch.stack([losses[self._places], shares]).tolist()
        self._losses.zero_()
        self._steps = 0
        return {name: {"loss": loss, "gradient": share} for name, loss, share in zip(self.names, *columns)}


class LoadMeter:
    """Counts of a model's mixtures over all ranks and all steps of a run, which `add_up` adds up, in place, over ranks
    that route other tokens. `labels` name the labels of samples, where the model counts by label. All ranks must call
    `read` and `close_window` alike; both wait for the device."""

    def __init__(
        self, model: nn.Module, dims: ParallelDims, add_up: Callable[[list[Tensor]], None],
        labels: Sequence[str] = (),
    ) -> None:  # fmt: skip
        named = {name: each for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)}
        self._mixtures = list(named.values())
        self._dims, self._add_up = dims, add_up
        self._device = next(model.parameters()).device
        count = max((mixture.labels for mixture in self._mixtures), default=0)
        names = tuple(labels) if len(labels) == count else tuple(map(str, range(count)))
        zero = tuple(((0,) * mixture.experts,) * max(1, count) for mixture in self._mixtures)
        self._before = LoadRecord(tuple(named), names, zero)
        """The counts that the mixtures no longer hold themselves."""

    def __bool__(self) -> bool:
        """Whether the model has mixtures."""
        return bool(self._mixtures)

    @torch.no_grad()
    def read(self) -> LoadRecord:
        """The record up to now."""
        sums = [self._visits_here(mixture) for mixture in self._mixtures]
        self._add_up(sums)
        if sums and self._dims.degree("pp") > 1:
            add_up_all(sums, self._dims.group("pp"))
        before = self._before
        counts = tuple(count_sum([old, new.tolist()], old) for old, new in zip(before.counts, sums))
        return LoadRecord(before.layers, before.labels, counts, before.windows)

    def close_window(self, step: int) -> list[float]:
        """End a window at `step`: the largest load over the mean one in it, of each layer."""
        record = self.read()
        worst = [imbalance(row) for row in record.last]
        self._before = record.closed(step)
        self._clear()
        return worst

    def state(self) -> Mapping[str, Any] | None:
        """The record in the form that checkpoints keep; None without mixtures."""
        return self.read().to_dict() if self else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the record of `state`; None is of a checkpoint without a record, after which counting starts at 0.

        Raises:
            ValueError: it is the record of another model.
        """
        fresh = self._before
        empty = tuple(tuple((0,) * len(row) for row in layer) for layer in fresh.counts)
        before = LoadRecord(fresh.layers, fresh.labels, empty) if state is None else LoadRecord.of_dict(state)
        shapes = [
            (r.layers, r.labels, [[len(row) for row in layer] for layer in r.counts]) for r in (before, fresh)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError("its record of experts' loads is of other layers, labels or experts")
        self._before = before
        self._clear()

    def write(self, output: Path) -> None:
        """Write the record and its page into the folder `experts` of a run's output, on the main rank."""
        record = self.read()
        if self and self._dims.main:
            write_text(own_file(output, "experts/loads.json"), record.to_json())
            write_text(own_file(output, "experts/loads.html"), loads_page(record))

    def _visits_here(self, mixture: MixtureOfExperts) -> Tensor:
        """A copy of the visits here, none of a mixture that is on another stage of a pipeline."""
        visits: Tensor | None = mixture.visits
        if visits is None:
            shape = max(1, mixture.labels), mixture.experts
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        return visits.clone()

    def _clear(self) -> None:
        for mixture in self._mixtures:
            visits: Tensor | None = mixture.visits
            if visits is not None:
                visits.zero_()


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
        self, prediction: Prediction, machine: Machine, device: torch.device, waited: Callable[[], float],
        sample: Useful | None = None,
    ) -> None:  # fmt: skip
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
