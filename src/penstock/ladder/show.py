"""A climb for the terminal, and written to files. Free of torch."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.boundary.files import own_file, write_text
from penstock.ladder.course import OnProgress
from penstock.ladder.page import picture, to_html
from penstock.ladder.result import LadderReport, Progress
from penstock.ladder.tables import (
    equality_words,
    figures,
    file_name,
    heading,
    in_plans,
    noise_words,
    plan_words,
    times,
)
from penstock.report.page import PLAIN_WIDTH, plain_console, terminal_table

_LISTED = 6
"""Most rungs that one line names."""
_ABSENT = {
    "unsupported": "do not apply here",
    "out of memory": "ran out of memory",
    "not run": "were not run",
}


def write(report: LadderReport, folder: Path | str) -> tuple[Path, Path]:
    """Write ladder.html, ladder.json and ladder.svg (for a script tune.html and so on) into a folder, which is made if
    needed. Returns the paths of the page and of its JSON."""
    html, data, drawing = (
        own_file(folder, f"{file_name(report)}.{kind}") for kind in ("html", "json", "svg")
    )
    write_text(html, to_html(report))
    write_text(data, json.dumps(report.to_dict(), indent=1) + "\n")
    write_text(drawing, picture(report) + "\n")
    return html, data


def table(report: LadderReport, width: int = PLAIN_WIDTH, *, every: bool = False) -> Table:
    """A row for each rung of the Plans, or with `every` for each measured rung, for a terminal of `width` columns."""
    shown = [rung for rung in report.rungs if in_plans(rung) or (every and rung.measured)]
    printed = terminal_table(figures(report, shown), width)
    printed.title, printed.title_justify, printed.title_style = heading(report), "left", "bold"
    return printed


def remarks(report: LadderReport, *, every: bool = False) -> list[str]:
    """Lines below the table: the rungs that it leaves out, in one line or with `every` each with its reason; the noise
    floor; and notes on the whole climb."""
    lines = [*_script_words(report), *(_reasons(report) if every else _counted(report))]
    if any(not rung.interleaved for rung in report.rungs):
        lines.append(
            "* timed after the others and not in turn with them, because memory could not hold both."
        )
    lines += [f"{rung.title}: {equality_words(rung.equality)}." for rung in report.rungs if rung.equality]
    if any(rung.memory_by_rank for rung in report.rungs):
        lines.append("For several processes, MiB is the memory of the one with the highest peak.")
    return [*lines, *filter(None, [noise_words(report)]), *report.notes]


def ending(report: LadderReport) -> list[tuple[str, str]]:
    """The recommended Plans, each in words and with its training command; the Plan with the same results is last."""
    offered = [("Same results", report.same_results)]
    if report.fastest is not None:
        offered.insert(0, ("Fastest of all", report.fastest))
    return [(f"{name}: {plan_words(report, plan)}", plan.train_command) for name, plan in offered]


def climbed(climb: Callable[[OnProgress], LadderReport], folder: Path | str, *, every: bool) -> None:
    """Climb with a display, write the report, and print it with the recommended commands."""
    display = display_for(sys.stderr)
    try:
        report = climb(display.show)
    finally:
        display.end()
    html, data = write(report, folder)
    console = plain_console()
    console.print(table(report, console.width, every=every))
    for remark in remarks(report, every=every):
        console.print(remark)
    console.print(f"\nWritten: {html} and {data}")
    for words, command in ending(report):
        console.print(f"\n{words}")
        console.print(command, soft_wrap=True)  # unwrapped, so that it can be copied


def _script_words(report: LadderReport) -> list[str]:
    """Facts about a script."""
    facts, rate = report.script, report.baseline.samples_per_second
    if facts is None or rate is None:
        return []
    model = f"{facts['model']} of {facts['parameters']:,} weights" if facts["model"] else "No module"
    lines = [
        f"{model}, trained by {facts['optimizer']} on {facts['device']}: {1000 / rate.value:.1f} ms a step as it is."
    ]
    if report.noise is not None:
        losses = ", ".join(f"{loss:.4f}" for loss in report.noise.losses)
        lines.append(f"Its loss on each seed, after the same steps: {losses}.")
    return lines


def _counted(report: LadderReport) -> list[str]:
    """One line on the rungs that are in no Plan, and one on those that were not measured."""
    left_out = [
        (rung.title, rung.to_previous) for rung in report.rungs if rung.measured and not in_plans(rung)
    ]
    slow = [(title, ratio) for title, ratio in left_out if ratio is not None]
    slow.sort(key=lambda pair: -pair[1].value)
    lines = []
    if slow:
        named = ", ".join(f"{title} {times(ratio)}" for title, ratio in slow[:_LISTED])
        more = f", and {len(slow) - _LISTED} more" if len(slow) > _LISTED else ""
        lines.append(f"{len(slow)} measured that no Plan includes: {named}{more}.")
    absent = Counter(rung.status for rung in report.rungs if not rung.measured)
    if absent:
        named = ", ".join(f"{n} {_ABSENT.get(status, status)}" for status, n in absent.items())
        lines.append(f"{named} (--all says why).")
    return lines


def _reasons(report: LadderReport) -> list[str]:
    """Reasons why rungs were not measured or not kept, each with the rungs to which it applies."""
    reasons: dict[str, list[str]] = {}
    for rung in report.rungs:
        if rung.reason:
            reasons.setdefault(f"{rung.status}: {rung.reason}", []).append(rung.title)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


# -- how a climb is shown while it runs: live on a terminal, plain lines everywhere else


_PHASES = {
    "baseline": "baseline", "search": "search for the fastest Plan", "losses": "losses of several seeds",
    "top": "each optimisation removed or added once", "path": "the path from the baseline to it",
    "apart": "what changes results", "race": "first and last against each other",
}  # fmt: skip
_DOING = {
    "building": "building", "compiling": "compiling", "timing": "measuring", "training": "training with",
    "weighing": "measuring the memory of",
}  # fmt: skip
_LONG = 4.0
"""Seconds from which an activity has a line of its own in a file."""
_QUIET = 8.0
"""Most seconds between two lines, even if all activities are short."""
_STANDINGS = 6


class PlainDisplay:
    """Writes a line when a phase begins, when a long activity begins, and now and then."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._phase, self._last = "", -float("inf")

    def show(self, now: Progress) -> None:
        """Write a line on the activity that begins, unless it is short and the last line is recent."""
        begins = now.phase != self._phase
        if not (begins or now.expected_seconds >= _LONG or self._clock() - self._last >= _QUIET):
            return
        self._phase, self._last = now.phase, self._clock()
        head = f"{_PHASES[now.phase]}: " if begins else ""
        self._stream.write(f"[{_minutes(now.spent)} of {_minutes(now.budget)}] {head}{describe(now)}\n")
        self._stream.flush()

    def end(self) -> None:
        """End the display; the climb has ended, for whatever reason."""


class LiveDisplay:
    """Shows the elapsed time, the current activity with its duration, and moving bars for the fastest Plans."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since = clock, 0.0
        self._now: Progress | None = None
        self._spinner = Spinner("dots")
        self._live = Live(console=console, transient=True, get_renderable=self.drawn, refresh_per_second=4)

    def show(self, now: Progress) -> None:
        """Show the activity that begins."""
        if self._now is None:
            self._live.start()
        self._now, self._since = now, self._clock()

    def end(self) -> None:
        """End the display; the climb has ended, for whatever reason."""
        self._live.stop()

    def drawn(self) -> RenderableType:
        """The current picture of the terminal."""
        now = self._now
        if now is None:
            return Text("")
        since = self._clock() - self._since
        spent = min(now.spent + since, now.budget)
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        remaining = Text(f"{_minutes(now.budget - spent)} left")
        head.add_row(Text(_PHASES[now.phase], "bold"), ProgressBar(now.budget, spent), remaining)
        doing = Text(f"{describe(now)}, {since:.0f} s so far", overflow="ellipsis", no_wrap=True)
        self._spinner.update(text=doing)
        return Group(head, self._spinner, _standings(now))


def _standings(now: Progress) -> Table:
    """The fastest Plans so far, each with a bar of a length proportional to its speed."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(ratio=3, no_wrap=True, overflow="ellipsis")
    shown = now.standings[:_STANDINGS]
    most = max((speed.value for _, speed in shown), default=1.0)
    for plan, speed in shown:
        # Bars are drawn at full length; the setting being timed is bold.
        style = "bold" if plan in now.plans else ""
        bar = ProgressBar(most, speed.value, complete_style="green", finished_style="green", style="black")
        table.add_row(Text(f"{speed.value:.2f}×", style), bar, Text(plan or "baseline", style))
    if more := len(now.standings) - len(shown):
        table.add_row("", "", Text(f"and {more} more", "dim"))
    return table


def display_for(stream: TextIO) -> PlainDisplay | LiveDisplay:
    """Live on a terminal, plain lines elsewhere (a log file, a pipe, a dumb terminal)."""
    console = Console(file=stream)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if live else PlainDisplay(stream)


def describe(now: Progress) -> str:
    """The current activity, in a line."""
    about = f" (about {now.expected_seconds:.0f} s)" if now.expected_seconds >= 1 else ""
    return f"{_DOING[now.doing]} {now.subject}{about}"


def _minutes(seconds: float) -> str:
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02d}"
