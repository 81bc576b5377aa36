"""`--profile`: a trace of a few steps for Perfetto, the distribution of their time, and the costliest operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.boundary.files import own_file, write_text
from penstock.planner.ideal import Least
from penstock.train.step_table import STEP, as_text, step_table

FIRST, COUNT = 3, 3
"""The fourth step and two more: the first ones compile, allocate, create the optimizer's state, and count memory."""
SHOWN = 10


class StepProfiler:
    """Profiles `COUNT` steps of a run into `output`/profile if `wanted`, and records the result."""

    def __init__(
        self, output: Path, device: torch.device, record: Callable[..., None], least: Callable[[], dict[str, Least]],
        *, wanted: bool,
    ) -> None:  # fmt: skip
        """`least` returns the minimum work of a step: see `penstock.planner.ideal`."""
        self._output, self._device, self._record, self._least = output, device, record, least
        self._left = COUNT if wanted else 0
        self._taken = 0
        self._running: Any = None

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """Take a step of the run inside; `last` says whether it is its last one."""
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
        """End the profile, on a GPU after all running kernels."""
        running, self._running, self._left = self._running, None, 0
        if running is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            running.stop()
        return running

    def _write(self, events: Any) -> None:
        """Write the trace, and the operators with the most time of their own, without operators that they called."""
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
    """The ten operators with the most own time: name, calls, milliseconds, share of the total, in [0, 1]."""
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
