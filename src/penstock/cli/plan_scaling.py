"""The model size for a compute budget, by the scaling laws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from penstock.cli._display import Part
from penstock.cli.plan_config import PlanConfig
from penstock.config.convert import plain
from penstock.config.machine import Machine
from penstock.planner.scaling_laws import LAWS, ParametricLaw, optima
from penstock.report.page import Cell, Section

ASSUMED_MFU = 0.45
"""The MFU that converts a budget of device hours to FLOPs, because no model is given."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
"""Sizes of over-trained models, relative to the optimum."""
_SOURCES = {law.name: law.source for law in LAWS} | {
    "Kaplan 2020": "Kaplan et al. 2020, section 6.1; without learning-rate decay matched to the tokens"
}


def advise(config: PlanConfig, machine: Machine) -> tuple[dict[str, Any], Iterator[Part]]:
    """The laws' advice for a budget of compute or of device hours, as data and as lines and tables."""
    compute, spent = config.compute, ""
    if compute is None:
        hours, rates = config.budget_gpu_hours or 0.0, machine.peak_flops
        peak = rates.get("bf16") or rates.get("fp16") or max(rates.values())
        compute = hours * 3600 * peak * ASSUMED_MFU
        spent = f"{hours:,.4g} hours of {machine.name} at an assumed MFU of {ASSUMED_MFU:.0%}: "
    lead = (
        f"{spent}{compute:.4g} FLOPs of training, C = 6 N D. Every law has the same product of parameters and tokens, "
        "but divides it differently: each was fitted to other runs."
    )
    served = config.served_tokens
    data = {
        "compute_flops": compute, "served_tokens": served, "allocations": _allocations(compute, served),
        "overtrained": {law.name: overtrained(law, compute, served) for law in LAWS},
    }  # fmt: skip
    return data, _parts(lead, data)


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


def _parts(lead: str, data: dict[str, Any]) -> Iterator[Part]:
    yield Text(lead)
    yield from (Text(f"{name}: {source}", style="dim") for name, source in _SOURCES.items())
    yield Text("\nThe optimum, by each law", style="bold")
    rows = []
    for row in data["allocations"]:
        cells = (
            *_sizes(row), f"{row['tokens_per_parameter']:.3g}", f"{row['loss']:.4f}", f"{row['compute_flops']:.3g}",
        )  # fmt: skip
        rows.append(("", [Cell(row["law"], words=True), *map(Cell, cells)]))
    heads = [Cell("law", words=True), *map(Cell, ("parameters", "tokens", "per parameter", "loss"))]
    yield Section(title="", columns=[*heads, Cell("FLOPs", rank=2)], rows=rows)
    yield Text("\nSmaller models, trained for longer to the same loss", style="bold")
    rows = []
    for name, sizes in data["overtrained"].items():
        for row in sizes:
            whole, more = row["share"] == 1.0, row["training_flops"] / data["compute_flops"] - 1
            cells = (f"{row['share']:.2f}", *_sizes(row), f"{more:+.0%}", f"{row['total_flops']:.3g}")
            rows.append(("strong" * whole, [Cell(name * whole, words=True), *map(Cell, cells)]))
    heads = [
        Cell("law", words=True),
        *map(Cell, ("size", "parameters", "tokens", "training")),
        Cell("FLOPs", rank=2),
    ]
    yield Section(title="", columns=heads, rows=rows)


def _sizes(row: dict[str, float]) -> tuple[str, str]:
    return f"{row['parameters'] / 1e9:.4g} B", f"{row['tokens'] / 1e9:.5g} B"
