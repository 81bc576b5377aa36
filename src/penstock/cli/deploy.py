"""`penstock deploy`: how to serve a model in time on the fewest devices."""

from __future__ import annotations

import json
import shlex
from typing import Any

from penstock.boundary.files import own_file, write_text
from penstock.cli._app import configured, load_or_described
from penstock.config.convert import plain
from penstock.config.machine import load_machine
from penstock.errors import ConfigError, ExitCode
from penstock.serve.settings import DeployConfig


@configured(DeployConfig, positional="model", flags=("json",), loader=load_or_described)
def deploy(config: DeployConfig) -> int:
    """Find the fewest devices that serve a model in time.

    MODEL is a preset, a folder of weights, or a name on the Hugging Face hub. Chooses the type of weights, the degrees
    of parallelism, the number of replicas, the requests at a time, and the size of the KV cache. Requests are simulated
    one by one, through the queue and the steps of the engine. Ends with code 7 if no layout answers in time.

        penstock deploy llama3-8b --gpus 1..8 --requests "rate=20 in=512 out=128"
    """
    if config.model is None:
        raise ConfigError(
            "penstock deploy needs a model: a preset such as llama3-8b, or a folder of weights."
        )
    # Imported here, because --help does without them.
    from penstock.cli._display import show
    from penstock.cli.deploy_show import parts_of
    from penstock.serve.deploy import explore, server_command
    from penstock.serve.traffic import requests_of

    if config.machine == "here":
        from penstock.probe import machine_for

        machine = machine_for()
    else:
        machine = load_machine(config.machine)
    arrivals = requests_of(config.requests, config.count, lasting=config.lasting, seed=config.seed)
    result = explore(config.model, machine, arrivals, config)
    command = [] if result.choice is None else server_command(config, machine, result.choice)
    if command and config.output is not None:
        text = f"#!/bin/sh\n# Penstock, one server for each replica.\nexec {shlex.join(command)}\n"
        write_text(own_file(config.output, "penstock.sh"), text)
    if config.json:
        data: dict[str, Any] = {"model": config.called, "machine": machine.name, "requests": config.requests}
        layouts = [
            plain(layout) | {"gpus": layout.gpus, "device_hours": layout.device_hours}
            for layout in result.layouts
        ]
        print(json.dumps(data | {"found": result.choice is not None, "layouts": layouts}, indent=1))
    else:
        show(parts_of(config, machine, arrivals, result))
        if command and config.output is not None:
            print(f"written: {config.output}/penstock.sh")
    return int(ExitCode.DONE if result.choice is not None else ExitCode.OUT_OF_MEMORY)
