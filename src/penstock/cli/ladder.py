"""`penstock ladder`: what each optimisation gains on this machine."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import require_folder
from penstock.cli._app import configured, load_or_described
from penstock.cli._options import Flag
from penstock.ladder.settings import LadderConfig


@configured(LadderConfig, positional="model", flags=("quick",), loader=load_or_described)
def ladder(
    config: LadderConfig, *, all_: Annotated[Flag, Parameter(name="--all")] = False
) -> None:  # fmt: skip
    """Measure what each optimisation gains on this machine.

    Searches for the fastest Plan that gives the same results, and measures what each of its optimisations gains in
    speed and memory. MODEL is a preset such as vit-s16, hf:FOLDER with a config.json of transformers, timm:NAME, or
    package.module:factory, a function that returns your model, an example batch, and a function loss(model, batch).

        penstock ladder vit-s16

    Parameters
    ----------
    all_
        List every rung, also those that do not pay or apply on this machine, with the reason.
    """
    # Memory is measured with torch's profiler, which would warn in every step that it started in the middle of a run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from penstock.ladder.climb import ladder as climb
    from penstock.ladder.show import climbed

    require_folder(config.output)
    climbed(lambda show: climb(config=config, on_progress=show), config.output, every=all_)
