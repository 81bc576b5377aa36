"""`penstock deploy`: how to serve a model in time on the fewest devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.boundary.files import write_text
from penstock.cli._app import configured
from penstock.config.convert import plain
from penstock.config.load import load
from penstock.config.machine import Machine, load_machine
from penstock.config.model import PRESETS, title
from penstock.errors import ConfigError, ExitCode
from penstock.serve.settings import HERE, DeployConfig


def load_or_folder(cls: type[Any], *, file: Path | None, overrides: Mapping[str, Any]) -> Any:
    """`load`, for which a model that is no preset's name and names a folder is the model in that folder."""
    given = dict(overrides)
    named = given.get("model")
    if isinstance(named, str) and named not in PRESETS and (Path(named).is_dir() or "/" in named):
        from penstock.models.convert import model_in

        found = model_in(named)
        if found is None:
            raise ConfigError(f"{named} has no config.json; give a folder that save_pretrained wrote.")
        given |= {"model": found, "weights": given.get("weights", named)}
    return load(cls, file=file, overrides=given)


@configured(DeployConfig, positional="model", flags=("json", "measure"), loader=load_or_folder)
def deploy(asked: DeployConfig) -> int:
    """Find how to serve MODEL in time on the fewest devices: type of weights, degrees, replicas, slots and cache.

    Requests are simulated one by one, through the queue and the turns of the engine. Ends with code 7 if no layout is
    in time.
    """
    if asked.model is None:
        raise ConfigError(
            "penstock deploy needs a model: a preset such as llama3-8b, or a folder of weights."
        )
    # Imported here, because --help does without them.
    from penstock.cli import deploy_show
    from penstock.serve.deploy import explore
    from penstock.serve.traffic import requests_of

    machine = _machine(asked.machine)
    arrivals = requests_of(asked.requests, asked.count, lasting=asked.lasting, seed=asked.seed)
    found = explore(asked.model, machine, arrivals, asked)
    files: dict[str, str] = {}
    if found.choice is not None and asked.output is not None:
        from penstock.cli.deploy_files import files_for

        files = files_for(asked, machine, found.choice)
        for name, text in files.items():
            write_text(Path(asked.output) / name, text)
    both = None
    if found.choice is not None and asked.measure:
        from penstock.cli.deploy_measure import measure

        both = measure(asked, machine, found.choice, arrivals)
    if asked.json:
        data: dict[str, Any] = {
            "model": title(asked.model),
            "machine": machine.name,
            "requests": asked.requests,
        }
        layouts = [plain(one) | {"gpus": one.gpus, "device_hours": one.device_hours} for one in found.layouts]
        data |= {} if both is None else plain(both)
        print(json.dumps(data | {"found": found.choice is not None, "layouts": layouts}, indent=1))
    else:
        deploy_show.show(asked, machine, arrivals, found, list(files))
        if both is not None and found.choice is not None and found.choice.served is not None:
            deploy_show.show_measured(found.choice.served, both)
    return int(ExitCode.DONE if found.choice is not None else ExitCode.OUT_OF_MEMORY)


def _machine(name: str) -> Machine:
    if name == HERE:
        from penstock.probe import machine_for

        return machine_for()
    return load_machine(name)
