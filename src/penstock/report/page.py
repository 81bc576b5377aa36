"""What a verb reports, in sections: as tables for a terminal, and as one self-contained HTML page.

The page has no script and makes no outside request; it is for light and dark screens and for paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.report.chart import STYLE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 132
"""Columns of what is written to a file or a pipe."""

_STYLES = {"strong": "green", "faint": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number worth reading first."""

    value: str
    words: str
    lead: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its value, and a smaller second line."""

    value: str
    small: str = ""
    words: bool = False
    """Aligned to the left, as text is."""
    minor: bool = False
    """Of a column's head: whether the column is left out where a terminal is too narrow for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with what belongs under it, in this order: text, code, figures, table, facts."""

    title: str
    text: str = ""
    code: str = ""
    figures: Sequence[str] = ()
    """`<svg>` elements, taken as they are."""
    columns: Sequence[Cell] = ()
    rows: Sequence[tuple[str, Sequence[Cell]]] = ()
    """Each a look (`strong`, `faint` or empty) and its cells."""
    facts: Mapping[str, str] = field(default_factory=dict)


def page(title: str, lead: str, tiles: Sequence[Tile], sections: Sequence[Section], footer: str = "") -> str:
    """A whole HTML document as text. All words are escaped here; only figures are taken as they are."""
    # Imported here, because it takes a tenth of a second.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("penstock", "report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("page.html").render(
        title=title, lead=lead, tiles=tiles, sections=sections, footer=footer, style=STYLE
    )


def terminal_table(section: Section, width: int) -> Table:
    """The table of a section for a terminal of so many columns: the first line of each cell.

    Columns without any value are left out, and minor ones, from the right, until the others fit.
    """
    # Imported here, because the tables of pages do without it.
    from rich.table import Table

    lines = [section.columns, *(cells for _, cells in section.rows)]
    sizes = [max(len(cells[i].value) for cells in lines) for i in range(len(section.columns))]
    shown = [i for i in range(len(sizes)) if any(cells[i].value for cells in lines[1:])]
    for i in reversed(shown):
        if section.columns[i].minor and sum(sizes[j] + 2 for j in shown) - 2 > width:
            shown.remove(i)
    made = Table(box=None, pad_edge=False, padding=(0, 1))
    for i in shown:
        head = section.columns[i]
        made.add_column(head.value, justify="left" if head.words else "right", no_wrap=not head.words)
    for look, cells in section.rows:
        made.add_row(*(cells[i].value for i in shown), style=_STYLES.get(look))
    return made


def plain_console() -> Console:
    """A console for words as they are, wide where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, highlight=False, markup=False)
