"""A load record as a page: a heat map of layers, and one of labels for each layer."""

from __future__ import annotations

from functools import partial

from penstock.planner.loads import LoadRecord, imbalance
from penstock.report.load_figure import MOST_CELLS, load_figure
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.record import environment

HEADS = ("layer", "experts", "visits", "largest over mean", "busiest", "least visited", "without visits")


def loads_table(record: LoadRecord) -> Section:
    """A row for each layer: how evenly its experts are visited."""
    rows = []
    for name, loads in zip(record.layers, record.totals):
        busiest, least = (
            max(range(len(loads)), key=loads.__getitem__),
            min(range(len(loads)), key=loads.__getitem__),
        )
        cells = (
            name, str(len(loads)), f"{sum(loads):,}", f"{imbalance(loads):.3f}", f"{busiest}: {loads[busiest]:,}",
            f"{least}: {loads[least]:,}", str(loads.count(0)),
        )  # fmt: skip
        rows.append(("", [Cell(text, words=place == 0) for place, text in enumerate(cells)]))
    columns = [Cell(head, words=place == 0, rank=place) for place, head in enumerate(HEADS)]
    return Section(title="Layers", columns=columns, rows=rows)


def loads_page(record: LoadRecord) -> str:
    """An HTML document of its own."""
    worst = max(map(imbalance, record.totals), default=1.0)
    rows = list(zip(record.layers, record.totals))
    steps = record.windows[-1].until if record.windows else 0
    tiles = [
        Tile(value=f"{worst:.2f}", words="largest over mean visits, of the most uneven layer", lead=True),
        Tile(value=f"{sum(map(sum, record.totals)):,}", words="visits"),
        Tile(value=f"{steps:,}", words="steps logged"),
    ]
    layers = Section(
        title="Visits of experts", figures=[partial(load_figure, rows, title="Visits by layer and expert")]
    )
    sections = [layers, loads_table(record)]
    for name, layer in zip(record.layers, record.counts) if record.labels else ():
        labelled = list(zip(record.labels, layer))
        figure = partial(load_figure, labelled, title=f"Visits by label and expert of {name}")
        if sum(len(row) for row in layer) <= MOST_CELLS:
            sections.append(Section(title=name, figures=[figure]))
    lead = "How often tokens visited each expert in training. Padding and evaluation count for nothing."
    return page("Experts' loads", lead, tiles, [*sections, origin(environment())])
