"""`penstock doctor`: say what works here, and how to fix what does not."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli._options import Json
from penstock.doctor import Finding
from penstock.errors import ExitCode

_MARKS = {"ok": ("✓", "green"), "slow": ("~", "yellow"), "absent": ("–", "dim"), "broken": ("✗", "red")}


def doctor(*, as_json: Json = False) -> int:
    """Check what works on this machine, and how to fix what does not.

    Ends with code 3 if something that Penstock requires is broken.

    Parameters
    ----------
    as_json
        Print the findings as JSON instead of a table.
    """
    from penstock.doctor import findings, healthy

    reported: list[Finding] = []
    for finding in findings():
        if not as_json:
            _show(finding, new_area=not reported or finding.area != reported[-1].area)
        reported.append(finding)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in reported], indent=1))
    else:
        broken = [f"broken: {each.name}: {each.remedy}" for each in reported if each.status == "broken"]
        for line in broken or ["Everything that is installed works."]:
            Console().print(line, style="red" if broken else "green", markup=False, soft_wrap=True)
    return int(ExitCode.DONE if healthy(reported) else ExitCode.ENVIRONMENT)


def _show(finding: Finding, *, new_area: bool) -> None:
    """Print a finding as soon as it is made: some take seconds."""
    table = Table.grid(padding=(0, 2))
    for width in (1, 23, None):
        table.add_column(width=width, no_wrap=width is not None)
    if new_area:
        table.add_row("", Text(finding.area, style="bold"), "")
    mark, style = _MARKS[finding.status]
    detail = Text(finding.detail)
    if finding.remedy:
        detail.append(f"\n→ {finding.remedy}", style="yellow")
    table.add_row(Text(mark, style=style), finding.name, detail)
    Console().print(table)
