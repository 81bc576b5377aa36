"""A climb for the terminal, and written to files. Free of torch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.boundary.files import own_file, write_text
from penstock.ladder.course import OnProgress
from penstock.ladder.display import display_for
from penstock.ladder.page import picture, to_html
from penstock.ladder.result import LadderReport
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

if TYPE_CHECKING:
    from rich.table import Table

_LISTED = 6
"""Rungs that are named in one line."""


def write(report: LadderReport, folder: Path | str) -> tuple[Path, Path]:
    """Write ladder.html, ladder.json and ladder.svg into a folder, which is made if needed; of a script, tune.html and
    so on. Returns the paths of the page and of its JSON."""
    html, data, drawing = (
        own_file(folder, f"{file_name(report)}.{kind}") for kind in ("html", "json", "svg")
    )
    write_text(html, to_html(report))
    write_text(data, json.dumps(report.to_dict(), indent=1) + "\n")
    write_text(drawing, picture(report) + "\n")
    return html, data


def table(report: LadderReport, width: int = PLAIN_WIDTH, *, every: bool = False) -> Table:
    """A row for each rung of the Plans, for a terminal of `width` columns; with `every` for each that was measured."""
    shown = [rung for rung in report.rungs if in_plans(rung) or (every and rung.measured)]
    printed = terminal_table(figures(report, shown), width)
    printed.title, printed.title_justify, printed.title_style = heading(report), "left", "bold"
    return printed


def remarks(report: LadderReport, *, every: bool = False) -> list[str]:
    """Lines that the table has no room for: rungs that it leaves out, in a line or with `every` each with its reason;
    the noise floor; and notes on the whole climb."""
    lines = [*_script_words(report), *(_reasons(report) if every else _counted(report))]
    if any(not rung.interleaved for rung in report.rungs):
        lines.append("* timed after the others and not in turn with them, because memory did not hold both.")
    lines += [f"{rung.title}: {equality_words(rung.equality)}." for rung in report.rungs if rung.equality]
    if any(rung.memory_by_rank for rung in report.rungs):
        lines.append("The MiB of several processes are those of the fullest one.")
    return [*lines, *filter(None, [noise_words(report)]), *report.notes]


def ending(report: LadderReport) -> list[tuple[str, str]]:
    """The Plans that the climb ends with, each in words and with the command that trains with it; last is the one with
    the same results."""
    offered = [("Same results", report.same)]
    if report.fastest is not None:
        offered.insert(0, ("Fastest of all", report.fastest))
    return [(f"{name}: {plan_words(report, plan)}", plan.train_command) for name, plan in offered]


def climbed(climb: Callable[[OnProgress], LadderReport], folder: Path | str, *, every: bool) -> None:
    """Climb with a display, write the report, and print it with the commands that it ends with."""
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
        console.print(command, soft_wrap=True)  # not wrapped, because this line is there to be copied


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
    """Rungs of no Plan, and then those that were not measured, in a line each."""
    slow = sorted(
        (rung for rung in report.rungs if rung.measured and not in_plans(rung) and rung.to_previous),
        key=lambda rung: -rung.to_previous.value if rung.to_previous else 0.0,
    )
    lines = []
    if slow:
        named = ", ".join(
            f"{rung.title} {times(rung.to_previous)}" for rung in slow[:_LISTED] if rung.to_previous
        )
        more = f", and {len(slow) - _LISTED} more" if len(slow) > _LISTED else ""
        lines.append(f"{len(slow)} measured that do not pay beyond the noise: {named}{more}.")
    absent = Counter(rung.status for rung in report.rungs if not rung.measured)
    words = {
        "unsupported": "do not apply here",
        "out of memory": "ran out of memory",
        "not run": "were not run",
    }
    if absent:
        lines.append(
            ", ".join(f"{n} {words.get(status, status)}" for status, n in absent.items())
            + " (--all says why)."
        )
    return lines


def _reasons(report: LadderReport) -> list[str]:
    """Why rungs were not measured or not kept, once for all that it holds for."""
    reasons: dict[str, list[str]] = {}
    for rung in report.rungs:
        if rung.reason:
            reasons.setdefault(f"{rung.status}: {rung.reason}", []).append(rung.title)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
