"""How a climb is shown while it runs: live on a terminal, plain lines everywhere else. Free of torch.

A display is notified of what comes next (`Progress`) before it is done, so that nothing long happens without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.ladder.result import Progress

_PHASES = {
    "baseline": "baseline", "search": "search for the fastest Plan", "losses": "losses of several seeds",
    "top": "each optimisation taken away once", "path": "the path from the baseline to it",
    "apart": "what changes results", "race": "first and last against each other",
}  # fmt: skip
_DOING = {
    "building": "building", "compiling": "compiling", "timing": "measuring", "training": "training with",
    "weighing": "measuring the memory of",
}  # fmt: skip
_LONG = 4.0
"""Seconds from which a single thing has a line of its own in a file."""
_QUIET = 8.0
"""The most seconds between lines, however short what is done."""
_STANDINGS = 6


class PlainDisplay:
    """A line when a phase begins, when something long begins, and now and then."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._phase, self._last = "", -float("inf")

    def show(self, now: Progress) -> None:
        """Write a line on what begins now, unless it is short and a line was written just before."""
        begins = now.phase != self._phase
        if not (begins or now.expected_seconds >= _LONG or self._clock() - self._last >= _QUIET):
            return
        self._phase, self._last = now.phase, self._clock()
        head = f"{_PHASES[now.phase]}: " if begins else ""
        self._stream.write(f"[{_minutes(now.spent)} of {_minutes(now.budget)}] {head}{describe(now)}\n")
        self._stream.flush()

    def end(self) -> None:
        """The climb has ended, for whatever reason."""


class LiveDisplay:
    """The time that has gone, what is done now and for how long, and the fastest Plans so far as bars that move."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since = clock, 0.0
        self._now: Progress | None = None
        self._spinner = Spinner("dots")
        self._live = Live(console=console, transient=True, get_renderable=self.drawn, refresh_per_second=4)

    def show(self, now: Progress) -> None:
        """Show what begins now."""
        if self._now is None:
            self._live.start()
        self._now, self._since = now, self._clock()

    def end(self) -> None:
        """The climb has ended, for whatever reason."""
        self._live.stop()

    def drawn(self) -> RenderableType:
        """The terminal's current picture."""
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
    """The fastest Plans so far: a bar each, as long as it is fast."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(ratio=3, no_wrap=True, overflow="ellipsis")
    shown = now.standings[:_STANDINGS]
    most = max((speed.value for _, speed in shown), default=1.0)
    for plan, speed in shown:
        # The whole bar is drawn as far as it reaches; what is in play at this moment is bold.
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
    return f"{_DOING[now.doing]} {now.what}{about}"


def _minutes(seconds: float) -> str:
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02d}"
