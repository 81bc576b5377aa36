"""Meters of a run: its speed and memory, the share of each head in loss and gradients, and the loads of experts, which
are saved in checkpoints and in files of the run.

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
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.boundary.files import own_file, write_text
from penstock.config.machine import Machine
from penstock.config.plan import Plan
from penstock.models.experts import MixtureOfExperts
from penstock.models.model import Model
from penstock.parallel import ParallelDims
from penstock.parallel.agree import add_up, average
from penstock.parallel.data import add_up_all
from penstock.planner import Prediction
from penstock.planner.describe import describe
from penstock.planner.loads import LoadRecord, count_sum, imbalance, loads_page
from penstock.step.memory import step_with_memory
from penstock.step.train_step import StepResult, TrainStep
from penstock.tasks import Task
from penstock.tasks.task import Fullness


class HeadMeter:
    """Accumulates losses of heads on the device; reading it is one transfer, which all ranks must make together."""

    def __init__(self, model: Any, task: Task, dims: ParallelDims, device: torch.device) -> None:
        graph = getattr(model, "graph", None)
        heads = {head.name for head in graph.heads} if graph is not None else set()
        self.names = [name for name in task.losses if name in heads]
        self._places = [task.losses.index(name) for name in self.names]
        self._dims, self._steps = dims, 0
        self._losses = torch.zeros(len(task.losses), device=device)
        self._model = model if self.names and isinstance(model, Model) else None
        if self._model is not None:
            self._model.head_squares = {}

    def add(self, parts: Tensor | None) -> None:
        """Add the parts of a step's loss. Does not wait for the device."""
        if parts is not None:
            self._losses += parts.to(self._losses.dtype)
            self._steps += 1

    def read(self) -> dict[str, dict[str, float]]:
        """For each head, the mean of its weighted `loss`, and as `gradient` its share of the squares of all gradients
        that heads send back into the model. Clears the sums. Waits for the device."""
        if not self.names or not self._steps:
            return {}
        losses = average(self._losses / self._steps, self._dims)
        squares = self._losses.new_zeros(len(self.names))
        if self._model is not None:
            own, self._model.head_squares = self._model.head_squares or {}, {}
            for place, name in enumerate(self.names):
                if name in own:
                    squares[place] = own[name]
        squares = add_up(squares, self._dims)
        if self._dims.pp > 1:  # only the last stage has heads
            distributed.all_reduce(squares, group=self._dims.group("pp"))
        shares = squares / squares.sum().clamp(min=torch.finfo(squares.dtype).tiny)
        columns = torch.stack([losses[self._places], shares]).tolist()
        self._losses.zero_()
        self._steps = 0
        return {name: {"loss": loss, "gradient": share} for name, loss, share in zip(self.names, *columns)}


class LoadMeter:
    """Counts how many tokens each expert of a model's mixtures receives, over all ranks and steps of a run. `add_up`
    adds counts, in place, over ranks with different tokens. `labels` are names of the samples' labels, if the model
    counts by label. All ranks must call `read` and `close_window` at the same steps; both wait for the device."""

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
        self._empty = self._before = LoadRecord(tuple(named), names, zero)
        """Earlier counts, which the mixtures no longer hold."""

    def __bool__(self) -> bool:
        """Whether the model has mixtures."""
        return bool(self._mixtures)

    @torch.no_grad()
    def read(self) -> LoadRecord:
        """The counts so far."""
        sums = [
            # Zeros for a mixture on another pipeline stage.
            torch.tensor(zero, device=self._device) if mixture.visits is None else mixture.visits.clone()
            for mixture, zero in zip(self._mixtures, self._empty.counts)
        ]
        self._add_up(sums)
        if sums and self._dims.degree("pp") > 1:
            add_up_all(sums, self._dims.group("pp"))
        before = self._before
        counts = tuple(count_sum([old, new.tolist()], old) for old, new in zip(before.counts, sums))
        return LoadRecord(before.layers, before.labels, counts, before.windows)

    def close_window(self, step: int) -> list[float]:
        """End a window at `step`; returns the largest load divided by the mean load in it, for each layer."""
        record = self.read()
        worst = [imbalance(row) for row in record.last]
        self._before = record.closed(step)
        self._clear()
        return worst

    def state(self) -> Mapping[str, Any] | None:
        """The counts in the form stored in checkpoints; None without mixtures."""
        return self.read().to_dict() if self else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the counts of `state`; if it is None, the checkpoint has none and counting starts at 0. Raises
        ValueError for counts of another model."""
        before = self._empty if state is None else LoadRecord.of_dict(state)
        shapes = [
            (r.layers, r.labels, [[len(row) for row in layer] for layer in r.counts])
            for r in (before, self._empty)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError("its record of experts' loads is of other layers, labels or experts")
        self._before = before
        self._clear()

    def write(self, output: Path) -> None:
        """Write the counts and their page into the folder `experts` of a run's output, on the main rank."""
        record = self.read()
        if self and self._dims.main:
            write_text(own_file(output, "experts/loads.json"), record.to_json())
            write_text(own_file(output, "experts/loads.html"), loads_page(record))

    def _clear(self) -> None:
        for mixture in self._mixtures:
            if mixture.visits is not None:
                mixture.visits.zero_()


class Speedometer:
    """Measures the speed of the steps since the last log, and of all steps.

    `start()` opens a window, `lap()` ends a step, `read()` closes the window. Time between `read` and `start`
    (evaluation, saving) belongs to no step. `waited` returns the total seconds that the loop has waited for data.

    FLOPs are the planner's: the model's, forward and backward, for a sample of the average length in `full` without
    padding, and the hardware's, which include recomputation. Attention counts in full, even if a causal mask hides half
    of it. For text, the FLOPs of a step are in proportion to its tokens.
    """

    def __init__(
        self, prediction: Prediction, machine: Machine, device: torch.device, waited: Callable[[], float],
        full: Fullness,
    ) -> None:  # fmt: skip
        plan = prediction.plan
        lengths = (max(1, round(full.real * source.length)) for source in full.model.graph.inputs)
        sample = full.model.with_lengths(*lengths)
        self.peak = f"{machine.name} {prediction.peak_name}, {machine.source}"
        """The peak that utilisation refers to: machine, type, datasheet or measured."""
        self.times: list[float] = []
        """Seconds of every step that was read."""
        self._samples_per_step = plan.global_batch
        self._tokens_per_step = plan.global_batch * sum(sample.graph.lengths)
        self._data_world = plan.dp
        self._tokens: list[int] = []
        """Tokens of every step so far, on this rank."""
        self._model_flops = describe(sample, Plan(micro_batch=1), words=full.words).model_flops
        self._hardware_flops = self._model_flops * prediction.hfu / prediction.mfu
        self._peak_flops = prediction.peak_flops * plan.gpus
        self._cuda = device.type == "cuda"
        self._waited = waited
        self._waited_before = 0.0
        self._waits = 0.0
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin the first step after a log, an evaluation or a save."""
        self._waited_before = self._waited()
        self._marks = [self._mark()]

    def lap(self, tokens: int = 0) -> None:
        """End a step of `tokens` tokens on this rank. On CUDA this records an event and does not wait."""
        self._marks.append(self._mark())
        self._tokens.append(tokens)

    def read(self) -> dict[str, float]:
        """The `speed` of the steps since `start`. On CUDA this waits for the last step."""
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
        """The `speed` of all steps except the first ones, which compile, allocate and choose kernels."""
        if not self.times:
            return {}
        first = min(5, len(self.times) // 2)
        settled = self.times[first:]
        waits = self._waits * sum(settled) / sum(self.times)
        return self.speed(settled, waits, self._tokens[first : len(self.times)])

    def speed(
        self, times: Sequence[float], wait_seconds: float, tokens: Sequence[int] = ()
    ) -> dict[str, float]:
        """Rates over steps with these `times` and `tokens`; times in seconds, rates per second, shares in [0, 1]."""
        total = sum(times)
        if total <= 0:
            return {}
        rate = len(times) * self._samples_per_step / total
        token_count = sum(tokens) * self._data_world  # as if all ranks had the same number
        full_samples = (
            token_count / self._tokens_per_step * self._samples_per_step / total if token_count else rate
        )
        return {
            "samples_per_second": rate,
            **({"tokens_per_second": token_count / total} if token_count else {}),
            "step_seconds_median": statistics.median(times),
            "step_seconds_p95": sorted(times)[math.ceil(0.95 * len(times)) - 1],
            "data_wait_share": min(wait_seconds / total, 1.0),
            "model_flops_per_second": full_samples * self._model_flops,
            "mfu": full_samples * self._model_flops / self._peak_flops,
            "hfu": full_samples * self._hardware_flops / self._peak_flops,
        }

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event_type: Any = torch.cuda.Event  # untyped in torch
        event = event_type(enable_timing=True)
        event.record()
        return event


class MemoryMeter:
    """Measures the memory that training needs, in tensors, as predictions count it.

    A GPU's allocator knows the peak of all steps. On a CPU one step is taken under a profiler: the second, because the
    first one creates the optimizer's state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._counted = 0

    def step(self, step: TrainStep, batches: Sequence[Any]) -> StepResult:
        """Take a step; on a CPU the second one is measured."""
        self._steps += 1
        if self._device.type != "cpu" or self._steps != 2:
            return step(batches)
        result, self._counted = step_with_memory(step, batches)
        return result

    def read(self) -> dict[str, Any]:
        """Bytes, and whether they count tensors or, if a CPU took a single step, the whole process."""
        if self._counted:
            return {"memory_bytes": self._counted, "memory_kind": "of tensors"}
        kind = "allocated at most" if self._device.type == "cuda" else "the whole process"
        return {"memory_bytes": peak_memory(self._device), "memory_kind": kind}


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak of a GPU's allocations, or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
