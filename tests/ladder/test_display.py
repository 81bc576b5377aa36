"""A climb says what it does before it does it: live on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from penstock.ladder.result import Estimate, Progress
from penstock.ladder.show import LiveDisplay, PlainDisplay, display_for

BEST = "optimizer=fused compile=whole"
NOW = Progress(
    phase="search", doing="compiling", subject=BEST, plans=(BEST,), expected_seconds=37.0, spent=65.0, budget=360.0,
    standings=((BEST, Estimate(value=2.4, low=2.3, high=2.5)), ("", Estimate.exact(1.0))),
)  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_begin_each_phase_and_each_long_thing() -> None:
    out, clock = io.StringIO(), Clock()
    display = PlainDisplay(out, clock=clock)
    display.show(
        replace(NOW, phase="baseline", doing="building", subject="the baseline", expected_seconds=0, spent=0)
    )
    assert NOW.what == NOW.subject
    display.show(NOW)
    for second in range(7):  # short ones are not told one by one
        clock.now = float(second)
        display.show(replace(NOW, doing="timing", expected_seconds=0.5))
    clock.now = 100.0
    display.show(replace(NOW, doing="timing", expected_seconds=0.5))
    display.end()
    assert out.getvalue().splitlines() == [
        "[0:00 of 6:00] baseline: building the baseline",
        f"[1:05 of 6:00] search for the fastest Plan: compiling {BEST} (about 37 s)",
        f"[1:05 of 6:00] measuring {BEST}",
    ]


def test_the_live_display_fits_its_terminal_and_moves() -> None:
    clock = Clock()
    for width in (60, 80, 200):
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=True, color_system=None)
        display = LiveDisplay(console, clock=clock)
        assert not str(display.drawn())  # nothing is known yet
        display._now, display._since = NOW, 0.0
        clock.now = 12.0
        console.print(display.drawn())
        lines = out.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        told = " ".join(lines)
        for words in (
            "search for the fastest Plan",
            "4:43 left",
            "compiling optimizer=fused",
            "2.40×",
            "1.00×",
        ):
            assert words in told, (width, words)
        rows = [line for line in lines if "×" in line]
        assert rows[0].count("━") > 1.8 * rows[1].count("━") > 0  # as long as they are fast


def test_only_a_terminal_is_live() -> None:
    assert isinstance(display_for(io.StringIO()), PlainDisplay)
