"""The model size for a compute budget, by the scaling laws: in a terminal, as JSON, or as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.cli.plan_config import PlanConfig
from penstock.cli.plan_layouts import write
from penstock.config.convert import plain
from penstock.config.machine import Machine
from penstock.planner.scaling_laws import LAWS, ParametricLaw, optima
from penstock.report.figures import Line, lines
from penstock.report.page import Cell, Section, Tile, origin, page, plain_console, terminal_table
from penstock.report.record import environment

COMPUTED = "Where this was computed"
ASSUMED_MFU = 0.45
"""The MFU that converts a budget of device hours to FLOPs, because no model is given."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
"""Sizes of over-trained models, relative to the optimum."""


def answer(config: PlanConfig, machine: Machine) -> None:
    """Show the laws' advice for a budget of compute or of device hours."""
    compute, served, spent = config.compute, config.served_tokens, ""
    if compute is None:
        hours = config.budget_gpu_hours or 0.0
        rates = machine.peak_flops
        peak = rates.get("bf16") or rates.get("fp16") or max(rates.values())
        compute = hours * 3600 * peak * ASSUMED_MFU
        spent = f"{hours:,.4g} hours of {machine.name} at an assumed MFU of {ASSUMED_MFU:.0%}: "
    lead = (
        f"{spent}{compute:.4g} FLOPs of training, C = 6 N D. Every law has the same product of parameters and tokens, "
        "but divides it differently: each was fitted to other runs."
    )
    if config.html is not None:
        write(config.html, scaling_page(lead, compute, served))
    if config.json:
        data = {
            "compute_flops": compute,
            "served_tokens": served,
            "allocations": _allocations(compute, served),
            "overtrained": {law.name: overtrained(law, compute, served) for law in LAWS},
        }
        print(json.dumps(data, indent=1))
        return
    console = plain_console()
    console.print(lead)
    for section in (_laws(compute, served), _smaller(compute, served)):
        console.print(f"\n{section.title}", style="bold")
        console.print(terminal_table(section, console.width))


def overtrained(law: ParametricLaw, compute: float, served: float) -> list[dict[str, float]]:
    """Costs of models smaller than the law's optimum at `compute`, trained until they reach its loss.

    `total_flops` adds 2 FLOPs per parameter and served token. Sizes that never reach the loss are left out.
    """
    best = law.optimum(compute)
    rows = []
    for share in SHARES:
        model = best if share == 1.0 else law.smaller(best, share)
        if model is not None:
            total = model.compute_flops + 2 * model.parameters * served
            rows.append(
                {
                    "share": share, "parameters": model.parameters, "tokens": model.tokens,
                    "training_flops": model.compute_flops, "total_flops": total,
                }
            )  # fmt: skip
    return rows


def _allocations(compute: float, served: float) -> list[dict[str, Any]]:
    """The optimum of every law; with tokens to serve, also the model of the same loss that is cheapest overall."""
    allocations = [(one.law, one) for one in optima(compute)]
    for law in LAWS if served else ():
        cheapest = law.with_inference(law.optimum(compute), served)
        allocations.append((f"{law.name}, serving {served:.3g} tokens", cheapest))
    per_parameter = "tokens_per_parameter"
    return [plain(one) | {"law": name, per_parameter: one.tokens_per_parameter} for name, one in allocations]


def scaling_page(lead: str, compute: float, served: float) -> str:
    """A page that compares the laws, with the trade-off of over-training."""
    tiles = [
        Tile(value=f"{one.tokens_per_parameter:.3g}", words=f"tokens per parameter, {one.law}", lead=i == 0)
        for i, one in enumerate(optima(compute))
    ]
    sections = [_laws(compute, served), _smaller(compute, served), origin(environment(), title=COMPUTED)]
    footer = "Computed by penstock plan --compute. Losses are of each law's own data and tokenizer."
    return page(f"What {compute:.4g} FLOPs train best", lead, tiles, sections, footer)


def _laws(compute: float, served: float) -> Section:
    rows: list[tuple[str, Sequence[Cell]]] = [
        (
            "",
            [
                Cell(one["law"], words=True), Cell(f"{one['parameters'] / 1e9:.4g} B"),
                Cell(f"{one['tokens'] / 1e9:.5g} B"), Cell(f"{one['tokens_per_parameter']:.3g}"),
                Cell(f"{one['loss']:.4f}"), Cell(f"{one['compute_flops']:.3g}"),
            ],
        )
        for one in _allocations(compute, served)
    ]  # fmt: skip
    sources = {law.name: law.source for law in LAWS} | {
        "Kaplan 2020": "Kaplan et al. 2020, section 6.1; without learning-rate decay matched to the tokens"
    }
    heads = [*map(Cell, ("parameters", "tokens", "per parameter", "loss")), Cell("FLOPs", rank=2)]
    return Section(
        title="The optimum, by each law", columns=[Cell("law", words=True), *heads], rows=rows, facts=sources
    )


def _smaller(compute: float, served: float) -> Section:
    """Over-training: each law's models that are smaller than its optimum and reach the same loss."""
    curves, rows = [], []
    for law in LAWS:
        models = overtrained(law, compute, served)
        points = [(one["parameters"] / 1e9, one["total_flops"]) for one in models]
        tips = [f"{law.name}: {size:.4g} B, {flops:.4g} FLOPs" for size, flops in points]
        curves.append(Line(label=law.name, points=points, tips=tips))
        rows += [
            (
                "strong" if one["share"] == 1.0 else "",
                [
                    Cell(law.name if one["share"] == 1.0 else "", words=True), Cell(f"{one['share']:.2f}"),
                    Cell(f"{one['parameters'] / 1e9:.4g} B"), Cell(f"{one['tokens'] / 1e9:.5g} B"),
                    Cell(f"{one['training_flops'] / compute - 1:+.0%}"), Cell(f"{one['total_flops']:.3g}"),
                ],
            )
            for one in models
        ]  # fmt: skip
    paid = f"training, and serving {served:.3g} tokens" if served else "training"
    figure = partial(
        lines, curves, log=True, title="FLOPs to reach the optimum's loss, by size", x_label="billion parameters",
        y_label=f"FLOPs of {paid}",
    )  # fmt: skip
    heads = [
        Cell("size", "of the optimum's"), Cell("parameters"), Cell("tokens"), Cell("training", "FLOPs more"),
        Cell("FLOPs", "with serving", rank=2),
    ]  # fmt: skip
    return Section(
        title="Smaller models, trained for longer to the same loss",
        text="Each curve keeps the loss of its law's optimum, at its right end. A smaller model needs more training "
        "and saves 2 FLOPs per parameter it lacks on every token that it serves.",
        figures=[figure],
        columns=[Cell("law", words=True), *heads],
        rows=rows,
    )
