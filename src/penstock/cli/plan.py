"""`penstock plan`: the best parallel layouts of a model on a cluster, their costs, and why the others are slower."""

from __future__ import annotations

import json

from penstock.cli._app import configured, load_or_described
from penstock.cli.plan_config import PlanConfig
from penstock.config.machine import load_machine


@configured(
    PlanConfig, positional="model", flags=("sensitivity", "run", "ladder", "json"), loader=load_or_described
)
def plan(config: PlanConfig) -> None:
    """Find the fastest parallel layout of a model on a cluster.

    MODEL is a preset, a config.json of transformers or Penstock, its folder, its name on the Hugging Face hub, or
    timm:NAME, such as timm:vit_small_patch16_224.
    Shows the memory and the time of each layout that fits, and why the others are slower. Nothing is run, so no GPU is
    needed. With --compute or --budget-gpu-hours and no MODEL, shows what model size and how many tokens scaling laws
    advise.

        penstock plan gpt-175b --machine a100-80g --gpus 1024 --global-batch 1536
    """
    config.check()
    # Imported here, because --help does without the planner.
    from penstock.cli import plan_layouts, plan_scaling
    from penstock.cli._display import show

    machine = load_machine(config.machine)
    data, parts = plan_scaling.advise(config, machine) if config.laws else plan_layouts.find(config, machine)
    if config.json:
        print(json.dumps(data, indent=1))
    else:
        show(parts)
