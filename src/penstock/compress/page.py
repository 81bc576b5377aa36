"""A compression as a table for the terminal, as a self-contained page, and as README.md, the card of its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from penstock import __version__
from penstock.boundary.files import shown
from penstock.config.compress import CompressConfig
from penstock.report.figures import Bar, waterfall
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.units import duration
from penstock.train.card import on_hub
from penstock.train.card import page as card_page

MB = 1e6
LOWER = ("loss", "perplexity")
"""Metrics for which lower is better."""
_REMEDIES = {
    "prune": "Remove less, or train afterwards with --distil.epochs.",
    "distil": "Try a lower --distil.lr, more --distil.epochs or another --distil.weight, or leave this step out.",
    "quantise": "Bound what it may cost with --quantise.drop, or let the scales learn with --quantise.learn.",
}


def table(report: Mapping[str, Any]) -> Section:
    """Size, latency, metrics and memory after each step, predicted and measured. Speeds are over the original's."""
    heads = [
        Cell("step", words=True), Cell("parameters"), Cell("MB"), Cell("latency"), Cell("predicted", rank=2),
        Cell("speed"), Cell("predicted speed", rank=1), Cell("memory, MB", rank=3),
        Cell("predicted memory", rank=3), Cell("validation", words=True),
    ]  # fmt: skip
    first, last = report["rows"][0], report["rows"][-1]
    rows = []
    for row in report["rows"]:
        expected = row.get("predicted_memory_bytes")
        cells = [
            Cell(row["title"], words=True), Cell(f"{row['parameters']:,}"), Cell(f"{row['bytes'] / MB:.2f}"),
            *_speed_cells(first, row), Cell(f"{row['memory_bytes'] / MB:.2f}"),
            Cell("" if expected is None else f"{expected / MB:.2f}"), Cell(row["words"], words=True),
        ]  # fmt: skip
        rows.append(("strong" if row is last else "", cells))
    assumed = " ".join(dict.fromkeys(row.get("assumption", "") for row in report["rows"]))
    worse = [worsening(*pair) for pair in pairwise(report["rows"])]
    text = "\n\n".join(filter(None, [assumed.strip(), *worse]))
    return Section(title="After each step", columns=heads, rows=rows, text=text)


def worsening(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A sentence if a step makes the model worse in the first three digits of its main metric; else ""."""
    name = "perplexity" if "perplexity" in after["metrics"] else next(iter(after["metrics"]))
    old, new = (row["metrics"][name] for row in (before, after))
    if f"{old:.3g}" == f"{new:.3g}" or (new < old) == (name in LOWER):
        return ""
    step = after["title"]
    return f"{step} made the model worse: {name} {old:.3g} → {new:.3g}. {_REMEDIES.get(step, '')}".strip()


def cuts_table(report: Mapping[str, Any]) -> Section | None:
    """The speed after each pruning cut, predicted and measured; None without cuts."""
    heads = [Cell("cut", words=True), *map(Cell, ("latency", "predicted", "speed", "predicted speed"))]
    cuts = [cut for row in report["rows"] for cut in row.get("notes", {}).get("cuts", ()) if "speed" in cut]
    first = report["rows"][0]
    rows = [("", [Cell(cut["words"], words=True), *_speed_cells(first, cut)]) for cut in cuts]
    return Section(title="After each cut", columns=heads, rows=rows) if rows else None


def to_html(report: Mapping[str, Any]) -> str:
    """The report as one page that loads nothing from outside."""
    rows, first, last = report["rows"], report["rows"][0], report["rows"][-1]
    speed, low, high, expected = _speeds(first, last)
    forecast = "" if expected is None else f", {expected:.2f}× predicted"
    tiles = [
        Tile(
            value=f"{speed:.2f}×",
            words=f"the speed of the original ({low:.2f} to {high:.2f}){forecast}",
            lead=True,
        ),
        Tile(value=f"{last['bytes'] / first['bytes']:.0%}", words="of its bytes of weights"),
        Tile(value=last["words"], words=f"validation, from {first['words']}"),
    ]
    bars, level = [], 0.0
    for row in rows:
        relative, _, _, wanted = _speeds(first, row)
        state: Any = "baseline" if row is first else "kept"
        bars.append(Bar(label=row["title"], state=state, value=relative, floor=level, predicted=wanted))
        level = relative
    sections = [
        Section(
            title="Speed",
            figures=[
                partial(
                    waterfall, bars, title="Speed after each step", x_label="speed relative to the original"
                )
            ],
        ),
        table(report),
        *filter(None, [cuts_table(report)]),
        origin(report["environment"]),
    ]
    return page("Compression", f"{first['folder']} in {len(rows) - 1} steps.", tiles, sections)


def _speeds(first: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[float, float, float, float | None]:
    """Measured speed relative to the original with its interval, and predicted speed; None if nothing is predicted."""
    predicted = row["predicted_seconds"]
    value, low, high = row["speed"]
    return value, low, high, first["predicted_seconds"] / predicted if predicted else None


def _speed_cells(first: Mapping[str, Any], row: Mapping[str, Any]) -> list[Cell]:
    """Latency and speed relative to the original, predicted and measured; empty if nothing is predicted."""
    (speed, low, high, expected), predicted = _speeds(first, row), row["predicted_seconds"]
    measured = f"{speed:.2f}×" + (f" ({low:.2f} to {high:.2f})" if row is not first else "")
    return [
        Cell(duration(row["seconds"], 3)), Cell("" if predicted is None else duration(predicted, 3)),
        Cell(measured), Cell("" if expected is None else f"{expected:.2f}×"),
    ]  # fmt: skip


def card(config: CompressConfig, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with the hub's header. `rows` are compress.json's, from the original to the compressed model, and `name`
    is the original's name.
    """
    source = config.model or ""
    head = {"library_name": "penstock", "tags": ["penstock", "compressed"], "base_model": on_hub(source)}
    table = "\n".join(
        f"| {row['title']} | {row['parameters']:,} | {row['bytes'] / 1e6:,.2f} | {1e3 * row['seconds']:.3g} | "
        f"{row['words']} |"
        for row in rows
    )
    steps = ", ".join(str(row["title"]) for row in rows[1:])
    text = f"""\
Made of {shown(source)} with Penstock {__version__}, by these steps: {steps}. `penstock compress --recipe compress.toml`
repeats them, with the file beside this one.

| model after | parameters | MB | ms | validation |
|---|---|---|---|---|
{table}
"""
    return card_page(head, f"{name}, compressed", text)
