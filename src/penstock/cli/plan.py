"""`penstock plan`: the best parallel layouts of a model on a cluster, their costs, and why the others are slower."""

from __future__ import annotations

from penstock.cli._app import configured
from penstock.cli.plan_config import PlanConfig
from penstock.config.machine import load_machine
from penstock.errors import ExitCode


@configured(PlanConfig, positional="model", flags=("sensitivity", "run", "json"))
def plan(config: PlanConfig) -> int:
    """Find the fastest parallel layout of MODEL on a cluster, with memory, time and why the others are slower.

    With --compute or --budget-gpu-hours and no MODEL, show what model size and how many tokens scaling laws advise.
    """
    config.check()
    # Imported here, because --help does without the planner.
    from penstock.cli import plan_layouts, plan_scaling

    machine = load_machine(config.machine)
    if config.laws:
        plan_scaling.answer(config, machine)
    elif config.explain is not None:
        plan_layouts.explain_one(config, machine)
    else:
        plan_layouts.search_all(config, machine)
    return int(ExitCode.DONE)
