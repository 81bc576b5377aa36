"""What a run measures about itself: speed, share of the peak, memory, waiting; and the files it is kept in.

Nothing here waits for the device within a step. On CUDA a pair of events brackets each step, and all are read together
when the loop stops to log anyway. On a CPU operators are done when they return, so the clock is read.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from penstock.config.machine import Machine
from penstock.errors import EnvironmentProblem
from penstock.planner import Prediction

Record = Mapping[str, Any]


class StepTimer:
    """Seconds of each step, read in bulk.

    `start()` opens a window, `lap()` ends a step, `read()` gives the steps since `start` and closes the
    window. Time between `read` and `start` (evaluation, saving) belongs to no step.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Open a window: the first step begins here."""
        self._marks = [self._mark()]

    def lap(self) -> None:
        """End a step. On CUDA this records an event and does not wait."""
        self._marks.append(self._mark())

    def read(self) -> list[float]:
        """Seconds of each step of the window. On CUDA this waits for the last one."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return [later - earlier for earlier, later in pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event_type: Any = torch.cuda.Event  # untyped in torch
        event = event_type(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Turns step times into the numbers that are logged.

    FLOPs are those the planner counts: of one sample forward and backward (`model_flops`), and with what the hardware
    computes twice (`hardware_flops`). Attention counts in full, for no model here is causal.
    """

    samples_per_step: int
    model_flops: float
    hardware_flops: float
    peak_flops: float
    peak: str
    """Which peak that is: machine, type, datasheet or measured."""

    @classmethod
    def of(cls, prediction: Prediction, machine: Machine) -> Meter:
        """The meter of a run of which `prediction` was made on `machine`."""
        plan = prediction.plan
        model_flops = prediction.model_flops_per_second_per_gpu * plan.gpus / prediction.samples_per_second
        return cls(
            samples_per_step=plan.global_batch,
            model_flops=model_flops,
            hardware_flops=model_flops * prediction.hfu / prediction.mfu,
            peak_flops=prediction.peak_flops * plan.gpus,
            peak=f"{machine.name} {prediction.peak_name}, {machine.source}",
        )

    def speed(self, times: Sequence[float], wait_seconds: float) -> dict[str, float]:
        """What steps that took these times come to; times in seconds, rates per second, shares in [0, 1]."""
        total = sum(times)
        if total <= 0:
            return {}
        rate = len(times) * self.samples_per_step / total
        return {
            "samples_per_second": rate,
            "step_seconds_median": statistics.median(times),
            "step_seconds_p95": percentile(times, 0.95),
            "data_wait_share": min(wait_seconds / total, 1.0),
            "model_flops_per_second": rate * self.model_flops,
            "mfu": rate * self.model_flops / self.peak_flops,
            "hfu": rate * self.hardware_flops / self.peak_flops,
        }


class Speedometer:
    """The speed of the steps since the last log, and of all of them. `waited` gives the total seconds so far that the
    loop has waited for data.
    """

    def __init__(self, meter: Meter, device: torch.device, waited: Callable[[], float]) -> None:
        self.meter = meter
        self._timer = StepTimer(device)
        self._waited = waited
        self._waited_before = 0.0
        self._times: list[float] = []
        self._waits = 0.0

    def start(self) -> None:
        """The first step after a log, or after an evaluation or a save, begins."""
        self._waited_before = self._waited()
        self._timer.start()

    def lap(self) -> None:
        """A step ends."""
        self._timer.lap()

    def read(self) -> dict[str, float]:
        """As `Meter.speed`, of the steps since `start`. On CUDA this waits for the last one."""
        times, waited = self._timer.read(), self._waited() - self._waited_before
        self._times += times
        self._waits += waited
        return self.meter.speed(times, waited)

    def whole_run(self) -> dict[str, float]:
        """As `Meter.speed`, of all steps but the first ones, which compile, allocate and choose kernels."""
        if not self._times:
            return {}
        settled = self._times[min(5, len(self._times) // 2) :]
        return self.meter.speed(settled, self._waits * sum(settled) / sum(self._times))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, or that the whole process occupied."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_memory() -> int:
    """Bytes that the process occupies now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def used_memory(device: torch.device, *, before: int) -> dict[str, Any]:
    """What training needed, to be held against a prediction: on a CPU the growth of the process over `before`."""
    if device.type == "cuda":
        return {"memory_bytes": peak_memory(device), "memory_kind": "allocated at most"}
    return {"memory_bytes": max(peak_memory(device) - before, 0), "memory_kind": "growth of the process"}


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, each whole line on its way to the disk at once.

    A kill can tear only the last line; `rewind`, called when a run resumes, drops that and everything that
    the run is about to do again, so no step is ever told twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def rewind(self, step: int, *, again: Collection[str] = ()) -> None:
        """Keep what was recorded up to the checkpoint of `step`; the file is replaced atomically.

        `again` names events that will be recorded anew at `step` itself.
        """
        self.close()  # or what follows would be written to the file that is replaced
        if not self._path.exists():
            return
        kept = [
            line
            for line, record in _whole_lines(self._path)
            if record["step"] < step or (record["step"] == step and record["event"] not in again)
        ]
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, record: Record) -> None:
        """Append one record. Numbers that are not finite become null, which JSON can say."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a `metrics.jsonl`."""
    return [record for _, record in _whole_lines(path)]


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and record.keys() >= {"event", "step"}:
            found.append((line, record))
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class TensorBoard:
    """The same records as TensorBoard scalars.

    Raises:
        EnvironmentProblem: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, resumed_at: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise EnvironmentProblem(
                "TensorBoard output needs the package tensorboardX. "
                "Install it with: pip install 'penstock[track]', or leave --tensorboard out."
            ) from None
        # purge_step makes TensorBoard forget what the run is about to do again.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)

    def write(self, record: Record) -> None:
        """Every number of a record, under `event/name`."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{record['event']}/{name}", value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
