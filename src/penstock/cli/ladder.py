"""`penstock ladder`: what each optimisation gains on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.cli._app import configured
from penstock.errors import ExitCode
from penstock.ladder.settings import LadderConfig

if TYPE_CHECKING:
    from penstock.ladder.result import RungResult

PLAIN_WIDTH = 132
"""Columns of the table where it goes to a file or a pipe."""


def factory_as_model(verb: Callable[..., int]) -> Callable[..., int]:
    """Let `--model package.module:factory` mean `--factory package.module:factory`. A preset's name has no colon."""

    @wraps(verb)
    def wrapped(*arguments: Any, **given: Any) -> int:
        for place in ("argument", "setting__model"):
            value = arguments[0] if place == "argument" and arguments else given.get(place)
            if isinstance(value, str) and ":" in value:
                given["setting__factory"] = value
                given.pop(place, None)
                arguments = () if place == "argument" else arguments
        return verb(*arguments, **given)

    wrapped.__signature__ = verb.__signature__  # type: ignore[attr-defined]
    return wrapped


@factory_as_model
@configured(LadderConfig, positional="model", flags=("alone", "quick"))
def ladder(config: LadderConfig) -> int:
    """Measure what each optimisation gains here, in speed, memory and loss, one rung at a time.

    MODEL is a preset such as vit-s16, or package.module:factory, a function that returns your model, an example batch,
    and a function loss(model, batch).
    """
    # Memory is measured with torch's profiler, which would warn in every step that it started in the middle of a run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rich.console import Console

    from penstock.ladder.climb import ladder as climb
    from penstock.ladder.show import remarks, table, write

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    messages = Console(stderr=True)

    def show(result: RungResult) -> None:
        ratio = f"{result.to_previous.median:.2f}×" if result.to_previous else ""
        reason = f" ({result.reason})" if result.reason else ""
        messages.print(
            f"{result.title:<24} {ratio:>7}  {result.status}{reason}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    report = climb(config=config, on_result=show)
    html, data = write(report, config.output)
    console.print(table(report))
    for remark in remarks(report):
        console.print(remark, highlight=False, markup=False)
    console.print(f"\nWritten: {html} and {data}\n", highlight=False, markup=False)
    console.print(f"{report.speedup:.2f}× the baseline's speed, with", highlight=False)
    # Not wrapped and not styled, because this line is there to be copied.
    console.print(report.train_command, soft_wrap=True, highlight=False, markup=False)
    return int(ExitCode.DONE)
