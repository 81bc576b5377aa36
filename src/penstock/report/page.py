"""One self-contained HTML page: no script, no outside request, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.report.svg import STYLE


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
