"""A climb for the terminal, and written to files. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.ladder.page import equality_words, figures, heading, to_html
from penstock.ladder.result import LadderReport
from penstock.report.page import PLAIN_WIDTH, terminal_table

if TYPE_CHECKING:
    from rich.table import Table


def write(report: LadderReport, folder: Path | str) -> tuple[Path, Path]:
    """Write ladder.html and ladder.json into a folder, which is made if needed. Returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    html, data = folder / "ladder.html", folder / "ladder.json"
    html.write_text(to_html(report), encoding="utf-8")
    data.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return html, data


def table(report: LadderReport, width: int = PLAIN_WIDTH) -> Table:
    """A row for each rung that was measured, for a terminal of so many columns; `remarks` has the others."""
    made = terminal_table(figures(report, [rung for rung in report.rungs if rung.measured]), width)
    made.title, made.title_justify, made.title_style = heading(report), "left", "bold"
    return made


def remarks(report: LadderReport) -> list[str]:
    """What the table has no room for: why rungs were not measured or not kept, and notes on the whole climb."""
    reasons: dict[str, list[str]] = {}
    for rung in report.rungs:
        if rung.reason:
            reasons.setdefault(f"{rung.status}: {rung.reason}", []).append(rung.title)
    said = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if any(not rung.interleaved for rung in report.rungs):
        said.append("* timed after the others and not in turn with them, because memory did not hold both.")
    said += [f"{rung.title}: {equality_words(rung.equality)}." for rung in report.rungs if rung.equality]
    if any(rung.memory_by_rank for rung in report.rungs):
        said.append("The MiB of several processes are those of the fullest one.")
    return [*said, *report.notes]
