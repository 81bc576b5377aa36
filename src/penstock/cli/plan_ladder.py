"""`penstock plan --ladder`: the predicted climb, in a terminal or as JSON."""

from __future__ import annotations

import json

from penstock.cli.plan_config import PlanConfig
from penstock.config.convert import plain
from penstock.config.machine import Machine
from penstock.ladder.predicted import PredictedRung, predicted_climb
from penstock.report.page import Cell, Section, plain_console, terminal_table
from penstock.report.units import GIB, duration


def show_climb(config: PlanConfig, machine: Machine) -> None:
    """Show rung by rung how much faster training gets on a machine, and which part of the whole gain each rung has."""
    gpus = config.gpus or 1
    rungs = predicted_climb(config.planned, machine, gpus=gpus, global_batch=config.global_batch)
    if config.json:
        climb = [plain(rung) | {"plan": rung.prediction.plan.line()} for rung in rungs]
        data = {"model": config.called, "machine": machine.name, "gpus": gpus, "rungs": climb}
        print(json.dumps(data, indent=1))
        return
    console, first = plain_console(), rungs[0].prediction
    console.print(
        f"{config.called} on {gpus} {machine.name}, {first.global_batch} samples a step, predicted: each rung on top "
        "of those before it."
    )
    path = [rung for rung in rungs if rung.kept]
    console.print(terminal_table(_table([rungs[0], *path]), console.width))
    if path:
        speedup, plan = path[-1].to_baseline, path[-1].prediction.plan
        console.print(f"all together: {speedup:.2f} times as fast: {plan.line()}", soft_wrap=True)
    offered = [rung for rung in rungs[1:] if not rung.kept]
    if offered:
        console.print(
            "These change results, and are shown one by one on top of all of the above:", style="bold"
        )
        console.print(terminal_table(_table(offered), console.width))
    console.print("penstock ladder measures the same climb on the machine that it runs on.", style="dim")


def _table(rungs: list[PredictedRung]) -> Section:
    heads = [
        Cell("rung", words=True), Cell("a step"), Cell("samples/s", rank=2), Cell("× before"), Cell("× baseline"),
        Cell("share"), Cell("MFU", rank=1), Cell("GiB"), Cell("changes", words=True, rank=3),
    ]  # fmt: skip
    rows = []
    for rung in rungs:
        prediction = rung.prediction
        look, too_much = ("", "") if prediction.fits else ("faint", " too much")
        cells = (
            duration(prediction.iteration_seconds, 3), f"{prediction.samples_per_second:,.1f}",
            f"{rung.to_previous:.2f}×", f"{rung.to_baseline:.2f}×", f"{rung.share:.0%}" if rung.kept else "",
            f"{prediction.mfu:.1%}", f"{prediction.memory_bytes / GIB:.1f}{too_much}",
        )  # fmt: skip
        rows.append((look, [Cell(rung.title, words=True), *map(Cell, cells), Cell(rung.change, words=True)]))
    return Section(title="The climb", columns=heads, rows=rows)
