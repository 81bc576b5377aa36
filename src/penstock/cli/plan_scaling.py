"""The model size for a compute budget, by the scaling laws: as text, JSON, or an HTML page."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import Any

from penstock.config.convert import plain
from penstock.config.machine import Machine
from penstock.errors import ConfigError
from penstock.planner.scaling_laws import LAWS, Allocation, ParametricLaw, kaplan, optima
from penstock.report.page import Cell, Section, Tile, page
from penstock.report.plan_figures import Line, curves

ASSUMED_MFU = 0.45
"""The MFU that converts a budget of device hours to FLOPs, because no model is given."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
"""Sizes of over-trained models, relative to the optimum."""
CHINCHILLA = 5.76e23
"""The compute of Hoffmann et al. 2022's model, at which the laws are compared."""


def compute_of(machine: Machine, compute: float | None, hours: float | None) -> float:
    """FLOPs to spend: as given, or computed in the given device hours.

    Raises ConfigError unless they are above 0 and finite.
    """
    if compute is not None and hours is not None:
        raise ConfigError("--compute and --budget-gpu-hours were both given; a budget is one of them.")
    if compute is None:
        rates = machine.peak_flops
        peak = rates.get("bf16") or rates.get("fp16") or max(rates.values())
        compute = (hours or 0.0) * 3600 * peak * ASSUMED_MFU
    if not 0 < compute < float("inf"):
        option = "--compute is" if hours is None else f"--budget-gpu-hours {hours:g} are"
        raise ConfigError(
            f"{option} {compute:g} FLOPs, which must be above 0 and finite; give another budget."
        )
    return compute


def allocations(compute: float, served: float) -> list[Allocation]:
    """The optimum of every law; with tokens to serve, also the model of the same loss that is cheapest
    overall."""
    found = optima(compute)
    for law in LAWS if served else ():
        found.append(law.with_inference(law.optimum(compute), served))
    return found


def overtrained(law: ParametricLaw, compute: float, served: float) -> list[dict[str, float]]:
    """Costs of models smaller than the law's optimum at `compute`, trained until they reach its loss.

    `total_flops` adds 2 FLOPs per parameter and served token. Sizes that never reach the loss are left out.
    """
    best = law.optimum(compute)
    found = []
    for share in SHARES:
        one = best if share == 1.0 else law.smaller(best, share)
        if one is not None:
            total = one.compute_flops + 2 * one.parameters * served
            found.append(
                {
                    "share": share, "parameters": one.parameters, "tokens": one.tokens,
                    "training_flops": one.compute_flops, "total_flops": total,
                }
            )  # fmt: skip
    return found


def _named(compute: float, served: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, one in enumerate(allocations(compute, served)):
        name = one.law if i <= len(LAWS) else f"{one.law}, serving {served:.3g} tokens"
        rows.append(plain(one) | {"law": name, "tokens_per_parameter": one.tokens_per_parameter})
    return rows


def as_json(compute: float, served: float) -> str:
    """Everything as JSON."""
    data = {
        "compute_flops": compute,
        "served_tokens": served,
        "allocations": _named(compute, served),
        "overtrained": {law.name: overtrained(law, compute, served) for law in LAWS},
    }
    return json_module.dumps(data, indent=1)


def as_text(machine: Machine, compute: float, hours: float | None, served: float) -> str:
    """The laws' answers and the costs of over-training, as lines."""
    lines = []
    if hours is not None:
        lines.append(f"{hours:,.4g} hours of {machine.name} at an assumed MFU of {ASSUMED_MFU:.0%}")
    lines.append(
        f"{compute:.4g} FLOPs of training, C = 6 N D. The laws disagree: each was fitted to other runs."
    )
    lines += [
        f"  {one['law']:45s} {one['parameters'] / 1e9:10.4g} B parameters {one['tokens'] / 1e9:10.5g} B tokens "
        f"{one['tokens_per_parameter']:8.3g} per parameter  loss {one['loss']:.4f}"
        for one in _named(compute, served)
    ]
    lines.append("smaller models trained to the same loss: tokens, and training FLOPs over the optimum's")
    for law in LAWS:
        each = overtrained(law, compute, served)
        said = (
            f"{one['share']:.2f} N: {one['tokens'] / 1e9:.4g} B, {one['training_flops'] / compute - 1:+.0%}"
            for one in each[1:]
        )
        lines.append(f"  {law.name:26s} {'; '.join(said)}")
    return "\n".join(lines)


def scaling_page(machine: Machine, compute: float, hours: float | None, served: float) -> str:
    """A page that compares the laws, with their differences and the trade-off of over-training."""
    best = optima(compute)
    spent = (
        ""
        if hours is None
        else f" ({hours:,.4g} hours of {machine.name} at an assumed MFU of {ASSUMED_MFU:.0%})"
    )
    tiles = [
        Tile(value=f"{one.tokens_per_parameter:.3g}", words=f"tokens per parameter, {one.law}", lead=i == 0)
        for i, one in enumerate(best)
    ]
    sections = [_laws(compute, served), _disagreement(), *(_tradeoff(law, compute, served) for law in LAWS)]
    sections.insert(2, _figure(compute, served))
    return page(
        f"What {compute:.4g} FLOPs train best",
        f"C = 6 N D: every law has the same product of parameters and tokens{spent}, but divides it differently.",
        tiles,
        sections,
        "Computed by penstock plan --compute. Losses are of each law's own data and tokenizer.",
    )


def _laws(compute: float, served: float) -> Section:
    rows = [
        (
            "",
            [
                Cell(one["law"], words=True), Cell(f"{one['parameters'] / 1e9:.4g} B"),
                Cell(f"{one['tokens'] / 1e9:.5g} B"), Cell(f"{one['tokens_per_parameter']:.3g}"),
                Cell(f"{one['loss']:.4f}"), Cell(f"{one['compute_flops']:.3g}"),
            ],
        )
        for one in _named(compute, served)
    ]  # fmt: skip
    sources = {law.name: law.source for law in LAWS} | {
        "Kaplan 2020": "Kaplan et al. 2020, section 6.1; without learning-rate decay matched to the tokens"
    }
    return Section(
        title="The optimum, by each law",
        columns=[
            Cell("law", words=True),
            *map(Cell, ("parameters", "tokens", "per parameter", "loss", "FLOPs")),
        ],
        rows=rows,
        facts=sources,
    )


def _disagreement() -> Section:
    words = ", ".join(f"{one.law} {one.tokens_per_parameter:.3g}" for one in [*optima(CHINCHILLA)])
    return Section(
        title="How far apart the laws are",
        text=f"At {CHINCHILLA:.3g} FLOPs, where Chinchilla was trained with 20 tokens per parameter, they advise: "
        f"{words}. The rounded exponents that Hoffmann et al. print give "
        f"{LAWS[0].optimum(CHINCHILLA).tokens_per_parameter:.1f} where Besiroglu et al.'s refit of the same points "
        f"gives {LAWS[2].optimum(CHINCHILLA).tokens_per_parameter:.1f}. Kaplan et al. "
        f"({kaplan(CHINCHILLA).tokens_per_parameter:.2g}) counted no embeddings, and used only small models.",
    )


def _figure(compute: float, served: float) -> Section:
    lines: Sequence[Line] = [
        Line(
            label=law.name,
            points=[
                (one["parameters"] / 1e9, one["total_flops"]) for one in overtrained(law, compute, served)
            ],
        )
        for law in LAWS
    ]
    what = f"training, and serving {served:.3g} tokens" if served else "training"
    figure = curves(
        lines, title="FLOPs to reach the optimum's loss, by size", x_label="billion parameters",
        y_label=f"FLOPs of {what}",
    )  # fmt: skip
    return Section(
        title="Smaller models, trained for longer",
        text="Each curve keeps the loss of its law's optimum, at its right end. A smaller model needs more training "
        "and saves 2 FLOPs per parameter it lacks on every token that it serves.",
        figures=[figure],
    )


def _tradeoff(law: ParametricLaw, compute: float, served: float) -> Section:
    rows = [
        (
            "strong" if one["share"] == 1.0 else "",
            [
                Cell(f"{one['share']:.2f}"), Cell(f"{one['parameters'] / 1e9:.4g} B"),
                Cell(f"{one['tokens'] / 1e9:.5g} B"), Cell(f"{one['training_flops'] / compute - 1:+.0%}"),
                Cell(f"{one['total_flops']:.3g}"),
            ],
        )
        for one in overtrained(law, compute, served)
    ]  # fmt: skip
    columns = ("of the optimum's size", "parameters", "tokens", "training FLOPs", "with serving")
    return Section(title=f"Over-training by {law.name}", columns=[*map(Cell, columns)], rows=rows)
