"""`penstock experts`: the record of experts' loads in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.errors import ConfigError


def experts(
    run: Path,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    csv: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
) -> None:
    """Show how often tokens visited each expert of a run's mixtures.

    Parameters
    ----------
    run
        The output folder of a run, or a record that --json printed.
    as_json
        Print the whole record as JSON, which this command and `penstock plan --loads` read.
    csv
        Print it as CSV: layer, label, expert, visits.
    html
        Write a page with heat maps to this file.
    """
    from penstock.boundary.files import write_text
    from penstock.planner.loads import read_loads
    from penstock.planner.loads_page import loads_page, loads_table
    from penstock.report.page import plain_console, terminal_table

    if as_json and csv:
        raise ConfigError("--json and --csv were both given; the record is printed in one form.")
    record = read_loads(run)
    if html is not None:
        write_text(html, loads_page(record))
    if as_json:
        print(record.to_json())
    elif csv:
        print(record.to_csv(), end="")
    else:
        console = plain_console()
        console.print(terminal_table(loads_table(record), console.width))
