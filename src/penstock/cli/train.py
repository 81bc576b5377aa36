"""`penstock train`: train a model, or resume its training."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.cli._options import Flag
from penstock.config.model import ModelConfig
from penstock.config.run import RunConfig

_TRACK = "Send the run's figures to tensorboard, wandb or mlflow; separate several by commas."
_PROFILE = "Profile three of the first steps: a trace for Perfetto and the ten costliest operators, in OUTPUT/profile."
_REPORT = (
    "Keep OUTPUT/train.html, a page of the run that a browser reads again while it trains; none: no page."
)
_USES: dict[str, tuple[str, ...]] = {
    "images": ("classify {run} PHOTO", "serve {run}"),
    "denoise": ("sample {run} --grid images.png", "compress {run} --quantise int8"),
    "next_token": ('generate {run} "The"', "serve {run}"),
    "chat": ("generate {run} --chat", "serve {run}"),
    "preferences": ("generate {run} --chat", "serve {run}"),
    "masked_words": ("train --from {run} --task sentences --data text:FILE", "embed {run} TEXT"),
    "sentences": ("classify {run} TEXT", "serve {run}"),
    "pairs": ("compress {run} --quantise int8", "export {run} MODEL.onnx"),
    "span_corruption": ("train --from {run} --task translation --data pairs:FILE", "generate {run} TEXT"),
    "translation": ("generate {run} TEXT", "serve {run}"),
    "embedding": ("embed {run} TEXT", "serve {run}"),
    "captions": ("retrieve {run} --text TEXT", "generate {run} --image PHOTO"),
    "universal": ('generate {run} "The"', "train --from {run} --task sentences --data text:FILE"),
}
"""Uses of a model, by the task that it was trained for."""


def next_commands(task: str, run: Path) -> list[str]:
    """Three commands that use what a run has trained."""
    folder = shlex.quote(str(run))
    return [f"penstock {use.format(run=folder)}" for use in ("evaluate {run}", *_USES[task])]


def _load(*sources: Any, **named: Any) -> RunConfig:
    from penstock.config.recipes import load_run

    def model_in(weights: str) -> ModelConfig | None:
        from penstock.models.convert import model_in as found

        return found(weights)

    return load_run(*sources, model_in=model_in, **named)


@configured(
    RunConfig,
    positional="model",
    aliases={
        "init_from": "from", "recipe.epochs": "epochs", "recipe.steps": "steps", "recipe.lr": "lr",
        "plan.micro_batch": "batch-size batch_size",
    },
    first=(
        "model", "data", "task", "init_from", "output", "recipe.epochs", "recipe.steps", "recipe.lr",
        "plan.micro_batch", "plan",
    ),
    loader=_load,
)  # fmt: skip
def train(
    config: RunConfig,
    *,
    resume: Annotated[bool, Parameter(help="Resume from the newest checkpoint in the output folder.")] = True,
    track: Annotated[str, Parameter(help=_TRACK)] = "",
    profile: Annotated[Flag, Parameter(help=_PROFILE)] = False,
    report: Annotated[Literal["page", "none"], Parameter(help=_REPORT)] = "page",
) -> None:
    """Train a model; resumes where it was stopped.

    A preset has settings of its own. Those in the file given with --config override them, and options given here
    override both. OUTPUT/run.toml keeps all settings of the run; with --config it runs the same again.

    To resume from the newest checkpoint, run the same command again. On SIGTERM or SIGUSR1 the run saves and ends with
    code 75, which tells schedulers to start it again. The other exit codes say what was wrong: 2 a setting, 3 the
    machine or a package, 4 the data, 5 the checkpoints, 6 a loss or weight that is not finite, 7 too little memory, 8 a
    rank that waited too long for another.

        penstock train vit-digits --output runs/digits
        penstock train vit-s16 --data imagefolder:/data/flowers --epochs 30
    """
    from penstock.config.tasks import task_name
    from penstock.tasks import task_of
    from penstock.tasks.scores import chance_words
    from penstock.train import train as run
    from penstock.train.callbacks import trackers
    from penstock.train.display import display_for
    from penstock.train.run_page import PAGE, RunPage

    task = task_of(config.model, config.task, init_from=config.reads_like)
    callbacks = [display_for(sys.stdout, task), *trackers(track), *([RunPage()] if report == "page" else [])]
    result = run(config, resume=resume, callbacks=callbacks, profile=profile)
    if int(os.environ.get("RANK", "0")):
        return  # all ranks have the same result
    if (evaluation := result.evaluation) is None:
        print(f"done: {result.steps} steps, without a validation split")
    else:
        by = f", by step {result.exported}, the best of the evaluations"
        best = "" if result.exported == result.steps else by
        metrics = task.describe(evaluation.metrics)
        print(f"done: {metrics} of {evaluation.samples:,} validation {task.unit}{best}")
        share = evaluation.metrics.get("top1", evaluation.metrics.get("accuracy"))
        if share is not None and (words := chance_words(share, result.classes or 0, evaluation.samples)):
            print(words)
    page = f", page in {result.output / PAGE}" if report == "page" else ""
    print(f"weights in {result.export}, metrics in {result.metrics}{page}")
    print("next:", *next_commands(task_name(config.model, config.task), result.output), sep="\n  ")
