"""`penstock ladder`: what each optimisation gains on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import require_folder
from penstock.cli._app import configured
from penstock.config.load import load
from penstock.errors import ExitCode
from penstock.ladder.settings import LadderConfig


def load_or_factory(cls: type[Any], *, file: Path | None, overrides: Mapping[str, Any]) -> Any:
    """`load`, for which `--model package.module:factory` means that factory. A preset's name has no colon."""
    settings = dict(overrides)
    if ":" in str(settings.get("model")):
        settings["factory"] = settings.pop("model")
    return load(cls, file=file, overrides=settings)


@configured(LadderConfig, positional="model", flags=("quick",), loader=load_or_factory)
def ladder(
    config: LadderConfig, *, all_: Annotated[bool, Parameter(name="--all", negative="")] = False
) -> int:  # fmt: skip
    """Measure what each optimisation gains on this machine.

    Searches for the fastest Plan that gives the same results, and measures what each of its optimisations gains in
    speed and memory. MODEL is a preset such as vit-s16, or package.module:factory, a function that returns your model,
    an example batch, and a function loss(model, batch).

        penstock ladder vit-s16

    Parameters
    ----------
    all_
        List every rung, also those that do not pay or apply on this machine, with the reason.
    """
    # Memory is measured with torch's profiler, which would warn in every step that it started in the middle of a run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from penstock.ladder.climb import ladder as climb
    from penstock.ladder.display import display_for
    from penstock.ladder.show import ending, remarks, table, write
    from penstock.report.page import plain_console

    require_folder(config.output)
    display = display_for(sys.stderr)
    try:
        report = climb(config=config, on_progress=display.show)
    finally:
        display.end()
    html, data = write(report, config.output)
    console = plain_console()
    console.print(table(report, console.width, every=all_))
    for remark in remarks(report, every=all_):
        console.print(remark)
    console.print(f"\nWritten: {html} and {data}")
    for words, command in ending(report):
        console.print(f"\n{words}")
        console.print(command, soft_wrap=True)  # not wrapped, because this line is there to be copied
    return int(ExitCode.DONE)
