"""The settings of a run: defaults, then those of the preset's job, a file, and the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted
from penstock.config.convert import NONE_WORDS
from penstock.config.jobs import JOBS, TUNING
from penstock.config.load import from_dict, load, read_file
from penstock.config.model import PRESETS, ModelConfig, ViTConfig, stacks, title
from penstock.config.rules import require
from penstock.config.run import RunConfig
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)


def load_run(
    cls: type[RunConfig] = RunConfig,
    *,
    file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    model_in: Callable[[str], ModelConfig | None] | None = None,
) -> RunConfig:
    """A run from general defaults, then the job of the preset that `overrides` or `file` name as `model`, then `file`,
    then `overrides`. Without a model, the preset is `vit-digits`.

    `model_in` gives the model that a folder of weights describes, or None if it describes none. With it, a run that
    starts from weights of a text model has the sizes of that model, and so has one that names no model at all; what is
    usual for fine-tuning comes over the preset's job.

    Raises ConfigError as `penstock.config.load.load` does.
    """
    given = dict(overrides or {})
    stored = read_file(file) if file is not None else {}
    name: Any = given.get("model", stored.get("model"))
    weights: Any = given.get("init_from", stored.get("init_from"))
    known = isinstance(name, str) and name in PRESETS
    found = None
    if name is None or (known and not isinstance(PRESETS[name], ViTConfig)):  # images can be of another size
        given_weights = isinstance(weights, str) and weights.lower() not in NONE_WORDS
        found = model_in(weights) if model_in and given_weights else None
    if name is None and file is None and found is None:
        name, known = "vit-digits", True
    base = _job(name) if known else RunConfig()
    if found is not None:
        base = replace(base, model=_of_weights(found, weights, base.model if known else None))
        tuning = dict(TUNING.get(given.get("task", stored.get("task", "")), {}))
        if "model.sequence" in tuning:
            tuning["model.sequence"] = min(tuning["model.sequence"], base.model.tokens)
        base = from_dict(RunConfig, tuning, origin="the defaults of fine-tuning", base=base)
        # The preset's name has done its work. Changes to single fields of the model still apply.
        given.pop("model", None)
        stored = {key: value for key, value in stored.items() if key != "model"}
    return load(cls, file=file, stored=stored, overrides=given, base=base)


def require_startable(config: RunConfig, *, elastic: bool = False) -> None:
    """Raise ConfigError for what can be told of a run before a rank starts: a Plan that this model refuses, and a
    warm-up that does not fit. The Plan of an `elastic` run changes with its ranks, and is checked alone."""
    require(config.plan, None if elastic else config.model, run=True)
    if config.recipe.steps is not None:
        config.recipe.warmup(config.recipe.steps)


def _job(name: str) -> RunConfig:
    settings = {"output": f"runs/{name}", **JOBS.get(name, {})}
    return from_dict(RunConfig, settings, origin=f"the job of {name}", base=RunConfig(model=PRESETS[name]))


def _of_weights(found: ModelConfig, weights: str, preset: ModelConfig | None) -> ModelConfig:
    """The model in a folder of weights, in place of a preset of its family. Samples may be made shorter than its table
    of positions, which stays as it is.
    """
    if not isinstance(found, ViTConfig) and any(stack.positions == "learned" for stack in stacks(found)):
        found = replace(found, max_positions=found.max_positions or found.sequence)
    if preset is None:
        return found
    if preset.family != found.family:
        raise ConfigError(
            f"init_from is {quoted(weights)}, which holds a model of the family {found.family}, but the preset is of "
            f"the family {preset.family}; name a preset of that family, or none."
        )
    if stacks(preset) != stacks(found):
        _log.warning("The model has the sizes of %s: %s.", weights, title(found))
    return found
