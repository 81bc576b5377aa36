"""Printing what a verb found: lines, headings and tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from penstock.report.page import Section, plain_console, terminal_table

Part = str | Text | Section


def show(parts: Iterable[Part]) -> None:
    """Print each part: a string unwrapped, because commands are copied; a `Text` wrapped at words; a section as its
    table, followed by its text."""
    console = plain_console()
    for part in parts:
        if isinstance(part, Section):
            console.print(terminal_table(part, console.width))
            part = Text(part.text.replace("\n\n", "\n"), style="dim")
        if isinstance(part, str):
            console.print(part, soft_wrap=True)
        elif part:
            console.print(part)
