"""`--profile`: a trace of a few steps that Perfetto opens, where their time goes, and the costliest operators; and
`--trace`: the passes of a pipeline's ranks in one step, drawn beside their prediction.

The step of `--trace` is one of the first; on a GPU each of its actions is waited for, so that it takes longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.boundary.files import own_file, write_text
from penstock.checkpoint.coordinator import collect
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.parallel import ParallelDims
from penstock.planner.ideal import Least
from penstock.planner.stages import stage_costs
from penstock.report.page import Section, Tile, page
from penstock.report.schedule_figure import schedule_figure
from penstock.schedules import Action, Measured, Simulation, Span, schedule_of, simulate
from penstock.step import Pipeline, StepResult, TrainStep
from penstock.train.step_table import STEP, as_text, step_table

FIRST, COUNT = 3, 3
"""The fourth step and two more: the first ones compile, allocate, make the optimizer's state, and count memory."""
SHOWN = 10


class StepProfiler:
    """Profiles `COUNT` steps of a run into `output`/profile where that is `wanted`, and records the result."""

    def __init__(
        self, output: Path, device: torch.device, record: Callable[..., None], least: Callable[[], dict[str, Least]],
        *, wanted: bool,
    ) -> None:  # fmt: skip
        """`least` returns the least work of a step: see `penstock.planner.ideal`."""
        self._output, self._device, self._record, self._least = output, device, record, least
        self._left = COUNT if wanted else 0
        self._taken = 0
        self._running: Any = None

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """Inside, the run takes a step; `last` says whether it is its last one."""
        if not self._left:
            yield
            return
        if self._taken == FIRST:
            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._running.start()
        try:
            with record_function(STEP):
                yield
        except BaseException:
            self._stop()
            raise
        self._taken += 1
        if self._running is None:
            return
        self._left -= 1
        if last or not self._left:
            self._write(self._stop())

    def _stop(self) -> Any:
        """End the profile; on a GPU with all kernels that are under way."""
        running, self._running, self._left = self._running, None, 0
        if running is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            running.stop()
        return running

    def _write(self, events: Any) -> None:
        """The trace, and the operators that took longest themselves, without what they called."""
        trace, table = (own_file(self._output, f"profile/{name}") for name in ("trace.json", "operators.txt"))
        trace.parent.mkdir(parents=True, exist_ok=True)
        events.export_chrome_trace(str(trace))
        operators = costliest_operators(events, on_device=self._device.type == "cuda")
        rows = step_table(trace, self._least())
        write_text(table, as_text(rows) + "\n" + operators_table(operators))
        steps = self._taken - FIRST
        self._record(
            "profile", trace=str(trace), table=str(table), profiled=steps, parts=rows, operators=operators
        )


def costliest_operators(events: Any, *, on_device: bool) -> list[dict[str, Any]]:
    """The ten operators with the most time of their own: name, calls, milliseconds, share of all, in [0, 1]."""
    kind = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows = [(event.key, event.count, float(getattr(event, kind))) for event in events.key_averages()]
    total = sum(time for _, _, time in rows) or 1.0
    ranked = sorted(rows, key=lambda row: -row[2])[:SHOWN]
    return [
        {"name": name, "calls": calls, "milliseconds": time / 1e3, "share": time / total}
        for name, calls, time in ranked
    ]


def operators_table(operators: list[dict[str, Any]]) -> str:
    """The operators as a table in plain text."""
    wide = max((len(operator["name"]) for operator in operators), default=8)
    lines = [f"{'operator':<{wide}}  {'calls':>7}  {'ms':>10}  {'share':>6}"]
    lines += [
        f"{one['name']:<{wide}}  {one['calls']:>7,}  {one['milliseconds']:>10,.2f}  {one['share']:>6.1%}"
        for one in operators
    ]
    return "\n".join(lines) + "\n"


TRACED = 4
"""The number of the step: the first ones compile, allocate, make the optimizer's state, and count memory."""


class PipelineTrace:
    """Records step `TRACED` of a run, or its last one, where `wanted`. All ranks make one and call it alike.

    Raises:
        ConfigError: the Plan has no pipeline.
    """

    def __init__(
        self, output: Path, model: ModelConfig, machine: Machine, plan: Plan, dims: ParallelDims,
        record: Callable[..., None], *, wanted: bool,
    ) -> None:  # fmt: skip
        if wanted and plan.pp == 1:
            raise ConfigError(
                "--trace draws what the ranks of a pipeline do, and plan.pp is 1; use --profile, or a plan with pp "
                "of 2 or more."
            )
        self._output, self._model, self._machine, self._plan = output, model, machine, plan
        self._dims, self._record, self._wanted = dims, record, wanted
        self._taken = 0

    def step(
        self, step: TrainStep, batches: Sequence[Any], take: Callable[..., StepResult], *, last: bool
    ) -> StepResult:
        """Take a step by `take`, and draw it if its turn has come."""
        self._taken += 1
        if not self._wanted or (self._taken < TRACED and not last):
            return take(step, batches)
        self._wanted = False
        assert isinstance(step.runner, Pipeline)
        distributed.barrier()  # from here on ranks count their time
        begun = time.perf_counter()
        actions: list[tuple[Action, float, float]] = []
        step.runner.trace = actions
        result = take(step, batches)
        step.runner.trace = None
        ranks = collect(lambda: [(str(action), start - begun, end - begun) for action, start, end in actions])
        if self._dims.main:
            self._write(ranks)
        return result

    def _write(self, ranks: Sequence[Sequence[tuple[str, float, float]]]) -> None:
        """Write the trace of the first pipeline's ranks, which differ from rank 0 in their stage alone. `ranks` has the
        actions of all ranks."""
        plan, per_stage = self._plan, len(ranks) // self._plan.pp
        measured = Measured.of(
            [
                [Span(place, Action.parse(word), start, end) for word, start, end in ranks[place * per_stage]]
                for place in range(plan.pp)
            ]
        )
        predicted = simulate(schedule_of(plan), stage_costs(self._model, self._machine, plan))
        drawing, data = (own_file(self._output, f"trace/pipeline.{kind}") for kind in ("html", "json"))
        write_text(drawing, _trace_page(plan, measured, predicted))
        runs = {"measured": _as_data(measured), "predicted": _as_data(predicted)}
        write_text(data, json.dumps({"plan": plan.line(), **runs}))
        self._record(
            "trace", page=str(drawing), bubble=float(measured.bubble_fraction),
            predicted=float(predicted.bubble_fraction), seconds=float(measured.makespan),
            predicted_seconds=float(predicted.makespan),
        )  # fmt: skip


def _as_data(run: Simulation) -> dict[str, Any]:
    """The numbers of a run, in seconds."""
    return {
        "bubble": float(run.bubble_fraction),
        "seconds": float(run.makespan),
        "busy": [float(busy) for busy in run.busy],
        "actions": [
            [span.rank, str(span.action), float(span.start), float(span.end)] for span in run.timeline()
        ],
    }


def _trace_page(plan: Plan, measured: Simulation, predicted: Simulation) -> str:
    def section(title: str, run: Simulation) -> Section:
        figure = partial(schedule_figure, run, title=title, unit="s")
        return Section(
            title=title,
            text=f"{float(run.makespan) * 1e3:.1f} ms, of which {float(run.bubble_fraction):.1%} idle.",
            figures=[figure],
        )

    tiles = [
        Tile(value=f"{float(measured.bubble_fraction):.1%}", words="bubble, measured", lead=True),
        Tile(value=f"{float(predicted.bubble_fraction):.1%}", words="bubble, predicted"),
    ]
    lead = f"{plan.schedule}, {plan.pp} stages, {plan.accumulate} micro-batches: the passes of one step."
    sections = [section("What ran", measured), section("What was predicted", predicted)]
    return page("A pipeline's step", lead, tiles, sections, plan.line())
