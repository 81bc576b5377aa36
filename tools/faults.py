"""Write docs/reference/faults.md from the figures of the fault suite: `make reference`, after `make test-faults`.

A test runs `page()` and compares, so the page cannot say other than the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PATH = ROOT / "docs" / "reference" / "faults.md"

INTRODUCTION = """\
# Faults and what they cost

Written by `make reference` from what `make test-faults` measured; do not edit. `make test` and `make test-slow` run a
short form of every row. Each row is a test: a fault that cost a bit, left a process or took too long would fail it.
"""


def page() -> str:
    """The page as it should be."""
    parts = [INTRODUCTION]
    for file in sorted(RESULTS.glob("faults_*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        title = file.stem.removeprefix("faults_").replace("_", " ").capitalize()
        rows = [f"| {row} | {_words(figures)} |" for row, figures in document["rows"].items()]
        machine, versions = document["machine"], document["versions"]
        source = (
            f"Measured on {document['time'][:10]} on {machine['cores']} cores of {machine['processor']}, torch "
            f"{versions['torch']}, by `{document['command']}`: `benchmarks/results/{file.name}`."
        )
        parts.append(
            "\n".join([f"## {title}", "", "| fault | figures |", "|---|---|", *rows, "", source, ""])
        )
    return "\n".join(parts)


def _words(figures: dict[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')}: {_word(value)}" for name, value in figures.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(inner)}" for name, inner in value.items())
    return str(value)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
