"""`penstock doctor`: say what works here, and how to fix what does not."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.doctor.finding import Finding
from penstock.errors import ExitCode

_MARKS = {"ok": ("✓", "green"), "slow": ("~", "yellow"), "absent": ("–", "dim"), "broken": ("✗", "red")}


def doctor(
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    thorough: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check what works on this machine, and how to fix what does not.

    Ends with code 3 if something that Penstock requires is broken.

    Parameters
    ----------
    as_json
        Print the findings as JSON instead of a table.
    thorough
        Also run torch.compile on a small function, which takes up to half a minute.
    """
    from penstock.doctor import examine, healthy

    findings = examine(thorough=thorough)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    return int(ExitCode.DONE if healthy(findings) else ExitCode.ENVIRONMENT)


def _show(findings: list[Finding]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column < 2)
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            table.add_row("", Text(area, style="bold"), "")
        mark, style = _MARKS[finding.status]
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", style="yellow")
        table.add_row(Text(mark, style=style), finding.name, detail)
    console.print(table)
    broken = [finding for finding in findings if finding.status == "broken"]
    if not broken:
        console.print("Everything that is installed works.", style="green")
    for finding in broken:
        console.print(f"broken: {finding.name}: {finding.remedy}", style="red", markup=False, soft_wrap=True)
