"""A command's report in sections: as tables for a terminal, as one self-contained HTML page, and for a notebook.

A page loads nothing from outside; it works on light and dark screens of any width and on paper. All pages share
`page.css` and `page.js`, a hundred lines that sort tables, copy code and show the tip of the shape under the pointer.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.report.chart import NARROW, WIDE, style
from penstock.report.record import facts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 1000
"""Width in columns of output to a file or a pipe: wide enough for all columns of a table, and for a row in one line."""

_STYLES = {"strong": "green", "faint": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One of the most important numbers."""

    value: str
    words: str
    lead: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its value, and a smaller second line."""

    value: str
    small: str = ""
    words: bool = False
    """Whether it is text, which is aligned to the left."""
    rank: int = 0
    """Rank of a column's head, 0 to 7: if a terminal or window is too narrow, columns of the highest rank are left out
    first, and those of rank 0 never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A small image with words below it."""

    png: bytes
    words: str
    look: str = ""
    """`wrong` for a picture to be noticed, else empty."""

    @property
    def source(self) -> str:
        """The image as a data address, so that a page needs no other file."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its content in this order: warning, text, code, pictures, figures, table, facts."""

    title: str
    text: str = ""
    warning: str = ""
    """A caution to read before the rest."""
    code: str = ""
    pictures: Sequence[Picture] = ()
    figures: Sequence[Callable[..., str]] = ()
    """Each is called with `width=`, once for a screen and once for a phone, and returns an `<svg>` element, which is
    inserted unescaped."""
    columns: Sequence[Cell] = ()
    rows: Sequence[tuple[str, Sequence[Cell]]] = ()
    """Each row is a look (`strong`, `faint` or empty) and its cells."""
    facts: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False
    """Whether the reader must open the section, as for a long reference list."""


def page(
    title: str, lead: str, tiles: Sequence[Tile], sections: Sequence[Section], footer: str = "", *, whole: bool = True,
    refresh: int = 0,
) -> str:  # fmt: skip
    """A whole HTML document as text, or without `whole` the same for a notebook's cell, which has no script. A browser
    reloads it every `refresh` seconds; 0: never.

    All words are escaped here; only figures are inserted unescaped.
    """
    template, css, script = _template()
    html: str = template.render(
        title=title, lead=lead, tiles=tiles, sections=list(map(_filled, sections)), footer=footer, whole=whole,
        script=script, style=f"{style('.penstock')}\n{css}", widths=(WIDE, NARROW), refresh=refresh,
    )  # fmt: skip
    return html


@functools.cache
def _template() -> tuple[Any, str, str]:
    """The template of pages, their styles and their script."""
    # Imported here, because they take a tenth of a second to import.
    from importlib.resources import files

    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("penstock", "report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    css, script = (
        files("penstock.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    return environment.get_template("page.html"), css, script


def origin(
    environment: Mapping[str, Any], *, title: str = "Where this was measured", command: str = "",
    more: Mapping[str, str] | None = None,
) -> Section:  # fmt: skip
    """The last section of every page: the command that reproduces it, date, versions and machine."""
    again = command or str(environment.get("command") or "")
    return Section(title=title, code=again, facts=facts(environment) | dict(more or {}))


def _filled(section: Section) -> Section:
    """The section without table columns that have no value."""
    if not section.columns:
        return section
    filled = [i for i in range(len(section.columns)) if any(cells[i].value for _, cells in section.rows)]
    rows = [(look, [cells[i] for i in filled]) for look, cells in section.rows]
    return replace(section, columns=[section.columns[i] for i in filled], rows=rows)


def terminal_table(section: Section, width: int) -> Table:
    """The table of a section for a terminal of `width` columns: the first line of each cell.

    Columns without values are left out, then those of the highest rank until the rest fits.
    """
    # Imported here, because pages do not need it for their tables.
    from rich.table import Table

    section = _filled(section)
    lines = [section.columns, *(cells for _, cells in section.rows)]
    sizes = [max(len(cells[i].value) for cells in lines) for i in range(len(section.columns))]
    shown = list(range(len(sizes)))
    for i in sorted(shown, key=lambda i: (-section.columns[i].rank, -i)):
        if section.columns[i].rank and sum(sizes[j] + 2 for j in shown) - 2 > width:
            shown.remove(i)
    printed = Table(box=None, pad_edge=False, padding=(0, 1))
    for i in shown:
        head = section.columns[i]
        printed.add_column(head.value, justify="left" if head.words else "right", no_wrap=not head.words)
    for look, cells in section.rows:
        printed.add_row(*(cells[i].value for i in shown), style=_STYLES.get(look))
    return printed


def plain_console() -> Console:
    """A console that prints words unchanged, and is wide if it is not a terminal."""
    from rich.console import Console

    plain = functools.partial(Console, highlight=False, markup=False, emoji=False)
    console = plain()
    return console if console.is_terminal else plain(width=PLAIN_WIDTH)


@functools.singledispatch
def cell(result: object) -> str:
    """A result as a notebook shows it. The function that formats a kind of result registers here, so that results
    contain no HTML themselves."""
    raise TypeError(f"Nobody has registered how a {type(result).__name__} looks in a notebook.")
