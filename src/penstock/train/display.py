"""Displays a run: a live progress display on a terminal, plain lines everywhere else.

A display is a callback and decides only how records look. The library shows nothing by itself: the command line passes
a display in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.tasks import Task
from penstock.tasks.task import plain
from penstock.train.callbacks import Callback, Record
from penstock.train.profile import operators_table
from penstock.train.step_table import as_text


class LineDisplay(Callback):
    """One line per record. Steps have a line at multiples of `log_every`, and in between at most every two seconds; it
    ends with the remaining time. `task` describes the metrics."""

    def __init__(self, stream: TextIO, task: Task, *, seconds: float = 2.0) -> None:
        self._stream, self._task, self._seconds = stream, task, seconds
        self._last = -float("inf")

    def on_start(self, record: Record) -> None:
        self._total, self._every, self._first = record["total"], record["log_every"], record["step"]
        self._began = time.monotonic()

    def on_record(self, record: Record) -> None:
        now, step, eta = time.monotonic(), record["step"], ""
        if record["event"] == "steps":
            if step % self._every and now - self._last < self._seconds and step < self._total:
                return
            self._last = now
            if self._first < step < self._total:
                seconds = (now - self._began) / (step - self._first) * (self._total - step)
                eta = f"  ETA {timedelta(seconds=round(seconds))}"
        if line := describe(record, self._total, self._task):
            self._stream.write(f"{line}{eta}\n")
            self._stream.flush()


class RichDisplay(Callback):
    """A progress bar with the latest numbers, and lines above it for evaluations and checkpoints."""

    def __init__(self, console: Console, task: Task) -> None:
        self._task = task
        self._progress = Progress(
            TextColumn("[bold]train"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip

    def on_start(self, record: Record) -> None:
        self._total = record["total"]
        self._bar: TaskID = self._progress.add_task(
            "train", total=self._total, completed=record["step"], numbers=""
        )
        self._progress.start()

    def on_record(self, record: Record) -> None:
        if record["event"] == "steps":
            self._progress.update(self._bar, completed=record["step"], numbers=_numbers(record))
        elif line := describe(record, self._total, self._task):
            self._progress.console.print(line, highlight=False, markup=False)

    def on_end(self) -> None:
        self._progress.stop()


def display_for(stream: TextIO, task: Task) -> Callback:
    """A live display on a terminal, plain lines elsewhere (a log file, a pipe, a dumb terminal)."""
    console = Console(file=stream)
    live = console.is_terminal and not console.is_dumb_terminal
    return RichDisplay(console, task) if live else LineDisplay(stream, task)


def describe(record: Record, total: int, task: Task) -> str:
    """A record as one line for people; empty if it has nothing to show."""
    event = record["event"]
    if event in ("start", "resume"):
        return _header(record)
    if event == "evaluation":
        return f"step {record['step']}/{total}  {_evaluation(record, task)}"
    return f"step {record['step']}/{total}  {_DESCRIBE[event](record)}" if event in _DESCRIBE else ""


def _header(record: Record) -> str:
    every, trained = record["parameters"], record["trained"]
    frozen = "" if trained == every else f"; {trained:,} of them train ({trained / every:.2%})"
    share = record.get("padding")
    padding = "" if share is None else f", {share:.0%} padding"
    if (unpacked := record.get("unpacked_padding")) is not None:
        padding = f", packed (with one document per sample {unpacked:.0%} would be padding)"
    rows = {
        "plan": record["plan"],
        "model": f"{every:,} parameters, {record['model']}{frozen}",
        "data": f"{record['data']}, {record['samples']:,} {record['unit']}, {record['batch']} a step{padding}",
        "device": f"{record['device']}; utilisation is of the peak of {record['peak']}",
        "output": record["output"],
    }
    if "fused" in record:
        places = [f"{name} in {count} places" for name, count in record["fused"].items() if count]
        rows["fused"] = ", ".join(places) or "nothing: no operator was measured to pay here"
    if record["event"] == "resume":
        rows["resumed"] = f"after step {record['step']} of {record['total']}"
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def _numbers(record: Record) -> str:
    parts = [f"loss {plain(record.get('loss'), '.4f')}"]
    if (rate := record.get("samples_per_second")) is not None:
        tokens = record.get("tokens_per_second")
        parts.append(f"{rate:,.0f} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s")
        parts.append(f"{with_prefix(record['model_flops_per_second'])}FLOP/s")
    if (mfu := record.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}")
    if loads := record.get("expert_load"):
        parts.append(f"experts {max(loads):.2f}")
    if heads := record.get("heads"):
        words = "{} {loss:.3f} ({gradient:.0%} of gradients)"
        parts.append(", ".join(words.format(name, **part) for name, part in heads.items()))
    if (wait := record.get("data_wait_share", 0.0)) >= 0.05:
        parts.append(f"waiting for data {wait:.0%}")
    return "  ".join(parts)


def _evaluation(record: Record, task: Task) -> str:
    averaged = "  (EMA weights)" if record["ema"] else ""
    sample = "".join(f"\n    {line}" for line in record.get("sample", "").splitlines())
    return f"evaluation of {record['samples']:,} {task.unit}: {task.describe(record)}{averaged}{sample}"


def _prediction(record: Record) -> str:
    return (
        f"predicted: {_time(record['iteration_seconds'])} a step, "
        f"{with_prefix(record['samples_per_second'])}samples/s, {with_prefix(record['memory_bytes'])}B of memory"
    )


def _summary(record: Record) -> str:
    predicted, measured = record["predicted"], record["measured"]
    return (
        f"a step took {_time(measured['step_seconds_median'])} (median; p95 "
        f"{_time(measured['step_seconds_p95'])}), predicted {_time(predicted['iteration_seconds'])}; "
        f"memory {with_prefix(measured['memory_bytes'])}B ({measured['memory_kind']}), "
        f"predicted {with_prefix(predicted['memory_bytes'])}B"
    )


def _profile(record: Record) -> str:
    table = as_text(record["parts"]) + "\n" + operators_table(record["operators"])
    return f"trace of {record['profiled']} steps in {record['trace']}, for ui.perfetto.dev\n{table}".rstrip()


_DESCRIBE: dict[str, Callable[[Record], str]] = {
    "steps": lambda record: f"epoch {record['epoch']:.2f}  {_numbers(record)}  lr {record['lr']:.2e}",
    "prediction": _prediction,
    "checkpoint": lambda record: f"saved {record['path']} in {record['seconds']:.2f} s",
    "patience": lambda record: (
        f"ended early: the last {record['worse']} evaluations are no better than the evaluation of step "
        f"{record['best_step']}"
    ),
    "summary": _summary,
    "profile": _profile,
}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def with_prefix(value: float) -> str:
    """`value` with an SI prefix, ready for its unit: 12_300 is `12.3 k`."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g} "
