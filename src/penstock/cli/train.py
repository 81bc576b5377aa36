"""`penstock train`: train a model, or resume its training."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig


@configured(RunConfig, positional="model", loader=load_run)
def train(
    config: RunConfig,
    *,
    resume: Annotated[bool, Parameter(help="Resume from the newest checkpoint in the output folder.")] = True,
    tensorboard: Annotated[bool, Parameter(negative="", help="Write TensorBoard event files too.")] = False,
) -> None:
    """Train a model; resumes where it was stopped.

    The file given with --config overrides the settings of the preset's own recipe, and options given here override
    both. OUTPUT/run.toml keeps all settings of the run; with --config it runs the same again.
    """
    from penstock.tasks import task_of
    from penstock.train import train as run
    from penstock.train.display import display_for

    result = run(config, resume=resume, tensorboard=tensorboard, display=display_for(sys.stdout))
    if int(os.environ.get("RANK", "0")):
        return  # all ranks have the same result
    found = result.evaluation
    task = task_of(config.model)
    print(f"done: {task.describe(found.metrics)} of {found.samples:,} validation {task.unit}")
    print(f"weights in {result.export}, metrics in {result.metrics}")
