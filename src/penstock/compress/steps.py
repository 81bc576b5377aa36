"""The steps of a compression: each reads a model's folder and writes one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.boundary.hub import local_weights
from penstock.compress.cut import cuts, multiple_of
from penstock.compress.data import task_data
from penstock.compress.measure import Workbench
from penstock.compress.quantise import quantise_folder
from penstock.config.compress import CompressConfig, Prune, StepName
from penstock.config.load import to_dict
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained
from penstock.models.convert.pretrained import read_config, save_values
from penstock.train.loop import train

NEVER = 1e6
"""Epochs between evaluations of a distil step: none before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of a step."""

    source: Path
    """Folder of the model that is read."""
    target: Path
    """Folder that is written; a run that an interrupted call left there is resumed, other files are replaced."""
    original: Path
    """Folder of the model that is compressed, the teacher."""
    prune: Prune
    """Shares that this call removes from the model in `source`."""


def prune_step(bench: Workbench, call: StepCall) -> dict[str, Any]:
    """Remove the parts that matter least; returns each cut with the sizes after it."""
    model = from_pretrained(call.source).to(bench.device)
    batches = bench.batches(call.prune.samples)
    made = list(cuts(model, call.prune, batches, bench.task, multiple=multiple_of(call.prune, bench.device)))
    if not made:
        raise ConfigError("The shares of prune are so small that nothing is removed; raise them.")
    shutil.rmtree(call.target, ignore_errors=True)
    save_values(made[-1].model, call.target, source=call.source)
    sizes = [(cut.words, cut.model.config) for cut in made]
    return {
        "cuts": [
            {"words": words, "model": to_dict(left), "predicted_seconds": bench.predicted(left)}
            for words, left in sizes
        ]
    }


def distil_step(bench: Workbench, call: StepCall) -> dict[str, Any]:
    """Train the model with the original as its teacher; an interrupted run is resumed from its checkpoints."""
    result = train(distil_run(bench.config, call))
    return {"steps": result.steps, "loss": result.loss}


def distil_run(config: CompressConfig, call: StepCall) -> RunConfig:
    """The run of a distil step."""
    distil = config.distil
    recipe = replace(
        config.recipe, steps=distil.steps, epochs=distil.epochs, lr=distil.lr or config.recipe.lr, warmup_steps=None,
        warmup_share=distil.warmup_share, teacher=str(call.original), teacher_weight=distil.weight,
        teacher_hidden=distil.hidden, teacher_attention=distil.attention, teacher_scores=distil.scores,
        temperature=distil.temperature, eval_every_epochs=NEVER,
    )  # fmt: skip
    return RunConfig(
        model=read_config(call.source), task=config.task, data=config.data, recipe=recipe, plan=config.plan,
        device=config.device, machine=config.machine, seed=config.seed, output=str(call.target),
        init_from=str(call.source),
    )  # fmt: skip


def quantise_step(bench: Workbench, call: StepCall) -> dict[str, Any]:
    """Store linear layers in few bits, calibrated and scored on the compression's data."""
    # The data are read with the tokenizer that earlier steps have written.
    config = replace(bench.config, data=bench.task_for(call.source)[1])
    data = task_data(call.source, config.data, task=config.task, samples=config.quantise.samples)
    data = replace(data, timed=config.batch)
    learns = config.quantise.learn > 0
    folder = call.target.with_name(f"{call.target.name}-start") if learns else call.target
    shutil.rmtree(folder, ignore_errors=True)
    result = quantise_folder(call.source, folder, replace(config.quantise, learn=0), data)
    notes: dict[str, Any] = {
        "layers": len(result.formats), "kept": dict(result.kept), "points_lost": result.lost,
    }  # fmt: skip
    if not learns:
        return notes
    if not result.formats:
        raise ConfigError("No layer could be rounded within quantise.drop: no scale can learn; raise it.")
    train(learning_run(config, replace(call, source=folder)))
    lost = None
    if data.score is not None and result.before is not None:
        lost = result.before - data.score(bench.open(local_weights(call.target)))
    return {**notes, "points_lost": lost, "points_lost_before_learning": result.lost}


def learning_run(config: CompressConfig, call: StepCall) -> RunConfig:
    """The run that trains the scales of the quantised model in `call.source`."""
    run, options = distil_run(config, call), config.quantise
    recipe = replace(
        run.recipe, steps=options.learn, lr=options.learn_lr, teacher_hidden=0.0, teacher_attention=0.0,
        teacher_scores=0.0,
    )  # fmt: skip
    return replace(run, recipe=recipe, plan=replace(run.plan, products="int8_pact"))


STEPS: dict[StepName, Callable[[Workbench, StepCall], dict[str, Any]]] = {
    "prune": prune_step, "distil": distil_step, "quantise": quantise_step,
}  # fmt: skip
"""The steps by name. A new step is a row here, a name in `penstock.config.compress`, and a field of its settings."""
