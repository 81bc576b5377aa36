"""Predictions as pages and cells of a notebook: where time and memory go. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from penstock.planner.cost import run_words, watt_hours
from penstock.planner.explain import MEMORY_WORDS, SECOND_WORDS
from penstock.planner.prediction import Prediction
from penstock.planner.search import Layouts
from penstock.report.figures import Stack, stacked_bars
from penstock.report.page import Cell, Section, Tile, cell, page
from penstock.report.units import GIB, duration, rounded

SHOWN = 8
"""Layouts that figures have."""


def times(predictions: Sequence[Prediction]) -> Section:
    """Section on where each layout's time goes, a bar for each of the fastest."""
    stacks = [Stack(label=_label(i, one), parts=one.seconds) for i, one in enumerate(predictions[:SHOWN], 1)]
    bars = partial(stacked_bars, stacks, title="Time of one step by part", unit="s", words=SECOND_WORDS)
    return Section(title="Where the time goes", figures=[bars])


def memories(predictions: Sequence[Prediction], limit: float | None = None) -> Section:
    """Section on where each layout's memory goes; `limit` in bytes is a device's room."""
    text, gib = "On the fullest device.", None if limit is None else limit / GIB
    if limit is not None:
        text += " The limit leaves room for the context, libraries and the allocator."
    stacks = [
        Stack(label=_label(i, one), parts={name: size / GIB for name, size in one.memory.items()})
        for i, one in enumerate(predictions[:SHOWN], 1)
    ]
    bars = partial(stacked_bars, stacks, title="Memory by part", unit="GiB", limit=gib, words=MEMORY_WORDS)
    return Section(title="Where the memory goes", text=text, figures=[bars])


def beside(layouts: Mapping[str, tuple[Prediction, Mapping[str, float]]], *, vision: bool) -> Section:
    """A table of layouts side by side, by their names: each a prediction, and its `costs`."""
    unit = "images" if vision else "tokens"
    columns = []
    for one, by_name in layouts.values():
        whole = {words: value for value, words in run_words(by_name)}
        columns.append({
            "devices": f"{one.gpus} {one.machine}", "one step": duration(one.iteration_seconds, 3),
            "samples a step": f"{one.global_batch:,}",
            f"{unit} per second": f"{one.samples_per_second * (1 if vision else one.tokens_per_sample):,.0f}",
            "MFU": f"{one.mfu:.1%}", "HFU": f"{one.hfu:.1%}",
            "memory of the fullest device": f"{one.memory_bytes / GIB:.1f} GiB",
            "energy of a step, at rated power": watt_hours(by_name), "time of the run": whole.get("of training", ""),
            "device hours": whole.get("GPU hours", ""), "energy of the run": whole.get("at rated power", ""),
            "CO₂ of the run": whole.get("of CO₂", ""), "cost of the run": whole.get("to pay", ""),
        })  # fmt: skip
    rows = [
        ("", [Cell(what, words=True), *(Cell(column[what] or "unknown") for column in columns)])
        for what in columns[0]
        if any(column[what] for column in columns)
    ]
    return Section(title="Side by side", columns=[Cell("", words=True), *map(Cell, layouts)], rows=rows)


def tiles(one: Prediction) -> list[Tile]:
    """The figures of one prediction that are worth reading first."""
    peak = f"MFU of {rounded(one.peak_flops / 1e12, 3)} TFLOP/s ({one.peak_name})"
    return [
        Tile(value=duration(one.iteration_seconds, 3), words="per optimizer step", lead=True),
        Tile(value=f"{one.mfu:.1%}", words=peak),
        Tile(value=f"{one.memory_bytes / GIB:.3g} GiB", words="on the fullest device"),
    ]


@cell.register
def prediction_cell(one: Prediction) -> str:
    """One prediction, for a cell of a notebook."""
    title = f"{one.gpus} {one.machine}" if one.gpus > 1 else one.machine
    lead = f"{one.plan.line()}; {one.global_batch} samples a step, {one.samples_per_second:.4g} a second."
    return page(title, lead, tiles(one), [times([one]), memories([one])], whole=False)


@cell.register
def search_cell(result: Layouts) -> str:
    """A search, for a cell of a notebook: the fastest layouts, and where their time and memory go."""
    lead = f"{result.tried:,} layouts tried, {result.too_large:,} do not fit."
    best = result[:SHOWN]
    if not best:
        return page("No layout fits", lead, [], [], whole=False)
    columns = [Cell(""), Cell("Plan", words=True), *map(Cell, ("s/step", "MFU", "GiB"))]
    rows = []
    for rank, one in enumerate(best, 1):
        figures = f"{one.iteration_seconds:.4g}", f"{one.mfu:.1%}", f"{one.memory_bytes / GIB:.3g}"
        cells = [Cell(str(rank)), Cell(one.plan.line(), words=True), *map(Cell, figures)]
        rows.append(("strong" if rank == 1 else "", cells))
    table = Section(title="The fastest layouts", columns=columns, rows=rows)
    title = (
        f"Layouts of {best[0].parameters / 1e9:.3g} billion parameters on {best[0].gpus} {best[0].machine}"
    )
    return page(title, lead, tiles(best[0]), [table, times(best), memories(best)], whole=False)


def _label(rank: int, one: Prediction) -> str:
    """A row in a few words: degrees above 1, sharding and recomputation."""
    p = one.plan
    degrees = {"tp": p.tp, "pp": p.pp, "dp": p.dp, "cp": p.cp, "ep": p.ep, "virtual": p.virtual}
    words = [f"{name} {value}" for name, value in degrees.items() if value > 1]
    words += [f"micro {p.micro_batch}"] + [p.sharding] * (p.dp > 1)
    budget = f" {p.budget:g} GiB" if p.recompute == "budget" else ""
    words += [f"recompute {p.recompute}{budget}"] * (p.recompute != "none")
    return f"{rank}: {', '.join(words)}"
