"""A load record as tables and as a page: how evenly the experts of each layer are visited, and by which labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.planner.loads import LoadRecord, imbalance
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.record import environment

HEADS = ("experts", "visits", "largest over mean", "busiest", "least visited", "without visits")


def loads_table(record: LoadRecord) -> Section:
    """A row for each layer: how evenly its experts are visited."""
    return _table("Layers", "layer", zip(record.layers, record.totals))


def _table(title: str, first: str, loads_by_name: Iterable[tuple[str, Sequence[int]]]) -> Section:
    rows = []
    for name, loads in loads_by_name:
        busiest, least = (best(range(len(loads)), key=loads.__getitem__) for best in (max, min))
        cells = (
            name, str(len(loads)), f"{sum(loads):,}", f"{imbalance(loads):.3f}", f"{busiest}: {loads[busiest]:,}",
            f"{least}: {loads[least]:,}", str(loads.count(0)),
        )  # fmt: skip
        rows.append(("", [Cell(text, words=place == 0) for place, text in enumerate(cells)]))
    columns = [Cell(head, words=place == 0, rank=place) for place, head in enumerate((first, *HEADS))]
    return Section(title=title, columns=columns, rows=rows)


def loads_page(record: LoadRecord) -> str:
    """An HTML document of its own."""
    worst = max(map(imbalance, record.totals), default=1.0)
    steps = record.windows[-1].until if record.windows else 0
    tiles = [
        Tile(value=f"{worst:.2f}", words="largest over mean visits, of the most uneven layer", lead=True),
        Tile(value=f"{sum(map(sum, record.totals)):,}", words="visits"),
        Tile(value=f"{steps:,}", words="steps logged"),
    ]
    sections = [loads_table(record)]
    for name, loads in zip(record.layers, record.counts) if record.labels else ():
        sections.append(_table(name, "label", zip(record.labels, loads)))
    lead = "How often tokens visited each expert in training. Padding and evaluation count for nothing."
    return page("Experts' loads", lead, tiles, [*sections, origin(environment())])
