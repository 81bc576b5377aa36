"""The card of a compressed model, README.md of its export: what it was made of, how, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock import __version__
from penstock.boundary.files import shown
from penstock.config.compress import CompressConfig
from penstock.train.card import on_hub, page


def card(config: CompressConfig, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with the hub's head. `rows` are those of compress.json, from the original to the compressed model, and
    `name` says what the original was.
    """
    source = config.model or ""
    head = {
        "library_name": "penstock",
        "tags": ["penstock", "compressed"],
        "base_model": on_hub(source),
    }
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
    return page(head, f"{name}, compressed", text)
