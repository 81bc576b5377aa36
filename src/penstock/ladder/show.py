"""A climb for the terminal, and written to files. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.ladder import cells
from penstock.ladder.page import heading, to_html
from penstock.ladder.result import LadderReport

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


def table(report: LadderReport) -> Table:
    """A row for each rung, for a terminal; `remarks` has the reasons in full."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=heading(report), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    made.add_column("rung", no_wrap=True)
    _, flops = cells.flop_unit(report)
    # Columns that would be empty are left out: a terminal is narrow.
    some = {
        "compile s": cells.compiling
        if any(rung.compile_seconds is not None for rung in report.rungs)
        else None,
        "loss": cells.loss,
        "≠ 1 proc": cells.equality if any(rung.equality for rung in report.rungs) else None,
    }
    last = {name: cell for name, cell in some.items() if cell is not None}
    for name in ("predicted", "measured", "in all", f"{report.unit}/s", flops, "MiB", *last):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    styles = {"baseline": "bold", "kept": "green", "not kept": "dim", "reported": "dim"}
    for rung in report.rungs:
        row = [""] * (5 + len(last))
        if rung.measured:
            row = [
                cells.ratio(rung),
                cells.of_baseline(rung),
                *cells.speeds(report, rung),
                cells.memory(rung),
            ]
            row += [cell(rung) for cell in last.values()]
        style = styles.get(rung.status, "yellow")
        made.add_row(rung.title, cells.predicted(rung), *row, rung.status, style=style)
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
    said += [f"{rung.title}: {cells.equality_words(rung)}." for rung in report.rungs if rung.equality]
    if any(rung.memory_by_rank for rung in report.rungs):
        said.append("The MiB of several processes are those of the fullest one.")
    outside = report.outside_noise()
    if outside:
        said.append(
            f"With these the loss differs from the baseline's by more than two standard deviations over seeds: "
            f"{cells.titles(outside)}."
        )
    return [*said, *report.notes]
