"""The model size for a compute budget, by the scaling laws: in a terminal or as JSON."""

from __future__ import annotations

import json
from typing import Any

from penstock.cli.plan_config import PlanConfig
from penstock.config.convert import plain
from penstock.config.machine import Machine
from penstock.planner.scaling_laws import LAWS, ParametricLaw, optima
from penstock.report.page import Cell, Section, plain_console, terminal_table

ASSUMED_MFU = 0.45
"""The MFU that converts a budget of device hours to FLOPs, because no model is given."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
"""Sizes of over-trained models, relative to the optimum."""
_KAPLAN = {
    "Kaplan 2020": "Kaplan et al. 2020, section 6.1; without learning-rate decay matched to the tokens"
}


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
    if config.json:
        data = {
            "compute_flops": compute, "served_tokens": served, "allocations": _allocations(compute, served),
            "overtrained": {law.name: overtrained(law, compute, served) for law in LAWS},
        }  # fmt: skip
        print(json.dumps(data, indent=1))
        return
    console = plain_console()
    console.print(lead)
    for name, source in ({law.name: law.source for law in LAWS} | _KAPLAN).items():
        console.print(f"{name}: {source}", style="dim", soft_wrap=True)
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
            rows.append({
                "share": share, "parameters": model.parameters, "tokens": model.tokens,
                "training_flops": model.compute_flops, "total_flops": total,
            })  # fmt: skip
    return rows


def _allocations(compute: float, served: float) -> list[dict[str, Any]]:
    """The optimum of every law; with tokens to serve, also the model of the same loss that is cheapest overall."""
    allocations = [(size.law, size) for size in optima(compute)]
    for law in LAWS if served else ():
        cheapest = law.with_inference(law.optimum(compute), served)
        allocations.append((f"{law.name}, serving {served:.3g} tokens", cheapest))
    return [
        plain(size) | {"law": name, "tokens_per_parameter": size.tokens_per_parameter}
        for name, size in allocations
    ]


def _laws(compute: float, served: float) -> Section:
    rows = []
    for row in _allocations(compute, served):
        cells = (
            f"{row['parameters'] / 1e9:.4g} B", f"{row['tokens'] / 1e9:.5g} B",
            f"{row['tokens_per_parameter']:.3g}", f"{row['loss']:.4f}", f"{row['compute_flops']:.3g}",
        )  # fmt: skip
        rows.append(("", [Cell(row["law"], words=True), *map(Cell, cells)]))
    heads = [Cell("law", words=True), *map(Cell, ("parameters", "tokens", "per parameter", "loss"))]
    return Section(title="The optimum, by each law", columns=[*heads, Cell("FLOPs", rank=2)], rows=rows)


def _smaller(compute: float, served: float) -> Section:
    """Over-training: each law's models that are smaller than its optimum and reach the same loss."""
    rows = []
    for law in LAWS:
        for row in overtrained(law, compute, served):
            look, name = ("strong", law.name) if row["share"] == 1.0 else ("", "")
            cells = (
                f"{row['share']:.2f}", f"{row['parameters'] / 1e9:.4g} B", f"{row['tokens'] / 1e9:.5g} B",
                f"{row['training_flops'] / compute - 1:+.0%}", f"{row['total_flops']:.3g}",
            )  # fmt: skip
            rows.append((look, [Cell(name, words=True), *map(Cell, cells)]))
    heads = [
        Cell("law", words=True), Cell("size", "of the optimum's"), Cell("parameters"), Cell("tokens"),
        Cell("training", "FLOPs more"), Cell("FLOPs", "with serving", rank=2),
    ]  # fmt: skip
    return Section(title="Smaller models, trained for longer to the same loss", columns=heads, rows=rows)
