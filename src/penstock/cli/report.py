"""`penstock report`: the page of a run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import write_text


def report(
    *runs: Annotated[Path, Parameter(allow_leading_hyphen=False)],
    output: Annotated[
        Path | None, Parameter(help="The page; train.html in the run's folder, or report.html.")
    ] = None,
) -> None:
    """Write the page of a run, or of several beside each other.

    RUNS are output folders of `penstock train`. The page of one is what `train` itself keeps; several are compared on
    one page: loss, metrics, speed, memory, and the settings that differ.

        penstock report runs/small runs/large --output compared.html
    """
    from penstock.errors import ConfigError
    from penstock.train.metrics import read_history
    from penstock.train.run_page import PAGE, to_html

    if not runs:
        raise ConfigError("Name the output folder of a run, or of several: penstock report runs/a runs/b.")
    histories = [read_history(run) for run in runs]
    page = output or (runs[0] / PAGE if len(runs) == 1 else Path("report.html"))
    write_text(page, to_html(histories))
    print(f"Written: {page}")
