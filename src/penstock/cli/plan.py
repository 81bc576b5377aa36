"""`penstock plan`: the best parallel layouts of a model on a cluster, their costs, and why the others are slower."""

from __future__ import annotations

from penstock.cli._app import configured
from penstock.cli.plan_config import PlanConfig
from penstock.config.machine import load_machine
from penstock.errors import ExitCode


@configured(PlanConfig, positional="model", flags=("sensitivity", "run", "json"))
def plan(asked: PlanConfig) -> int:
    """Find the fastest parallel layout of MODEL on a cluster, with memory, time and why the others are slower.

    With --compute or --budget-gpu-hours and no MODEL, show what model size and how many tokens scaling laws advise.
    """
    asked.check()
    # Imported here, because --help does without the planner.
    from penstock.cli import plan_layouts, plan_scaling

    machine = load_machine(asked.machine)
    if asked.laws:
        plan_scaling.answer(asked, machine)
    elif asked.explain is not None:
        plan_layouts.explain_one(asked, machine)
    else:
        plan_layouts.search_all(asked, machine)
    return int(ExitCode.DONE)
