"""One self-contained HTML page: no script, no outside request, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from penstock.report.svg import STYLE

_STYLE = (
    STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 ui-sans-serif,system-ui,"Segoe UI",
"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:40px 28px 64px}
h1{font-size:32px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:20px;margin:0 0 4px}
p{margin:0 0 12px;max-width:88ch}
.lead{color:var(--muted);font-size:17px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:14px;margin:26px 0}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:16px 18px}
.tile b{display:block;font-size:29px;line-height:1.2;font-weight:650;font-variant-numeric:tabular-nums}
.tile.lead-tile b{color:var(--accent)}
.tile span{display:block;color:var(--muted);font-size:14px;line-height:1.4}
section{padding:22px 26px;margin:18px 0}
section>p{color:var(--muted);font-size:15px}
figure{margin:14px 0 0}
pre{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:12px 14px;margin:8px 0 0;
overflow-x:auto;font:14px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;margin-top:10px}
th,td{padding:7px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums}
th{color:var(--muted);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child,td.words,th.words{text-align:left}
td small,th small{display:block;font-weight:400;color:var(--muted);font-size:12.5px;line-height:1.35}
tr.kept td:first-child{font-weight:600}
td.words:last-child{min-width:170px}
tr.left td,tr.absent td{color:var(--muted)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 22px;margin:10px 0 0;font-size:14.5px}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:14px;margin-top:26px}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""
)


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
    """Set flush left, as text is."""


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
    """Each a class (`kept`, `left`, `absent` or empty) and its cells."""
    facts: Mapping[str, str] = field(default_factory=dict)


def page(title: str, lead: str, tiles: Sequence[Tile], sections: Sequence[Section], footer: str = "") -> str:
    """A whole HTML document as text. All words are escaped here; only figures are taken as they are."""
    boxes = "".join(
        f'<div class="tile{" lead-tile" if tile.lead else ""}">'
        f"<b>{escape(tile.value)}</b><span>{escape(tile.words)}</span></div>"
        for tile in tiles
    )
    body = "".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>'
        f'<div class="tiles">{boxes}</div>{body}<footer>{escape(footer)}</footer></main></body></html>\n'
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(paragraph)}</p>" for paragraph in section.text.split("\n\n") if paragraph]
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    parts += [f"<figure>{figure}</figure>" for figure in section.figures]
    if section.rows:
        head = "".join(_cell(cell, "th") for cell in section.columns)
        rows = "".join(
            f'<tr class="{escape(kind)}">{"".join(_cell(cell, "td") for cell in cells)}</tr>'
            for kind, cells in section.rows
        )
        parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    if section.facts:
        facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in section.facts.items())
        parts.append(f"<dl>{facts}</dl>")
    return f"<section>{''.join(parts)}</section>"


def _cell(cell: Cell, tag: str) -> str:
    kind = ' class="words"' if cell.words else ""
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    return f"<{tag}{kind}>{escape(cell.value)}{small}</{tag}>"
