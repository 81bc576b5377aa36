"""What the how-to says that compression was measured to cost and gain."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _benchmark(name: str) -> ModuleType:
    """A program of benchmarks/, which finds others beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)


def test_tables_of_the_how_to_are_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "compress.md").read_text(encoding="utf-8")
    stored = json.loads(
        (ROOT / "benchmarks" / "results" / "compress_tasks_cpu.json").read_text(encoding="utf-8")
    )
    assert stored["summary"] == _benchmark("compress_tasks").summary(stored["cells"])
    forms = {
        "int8": ("before", "deviation_between_seeds", "lost", "most", "bound"),
        "student": ("twin", "deviation_between_seeds", "gained", "deviations_gained"),
        "recipe": ("before", "deviation_between_seeds", "lost", "most", "times_as_fast"),
    }
    for name, entry in stored["summary"].items():
        task, part = name.split(", ")
        figures = [entry.get(figure) for figure in forms[part]]
        words = ["" if figure is None else f"{round(figure, 2) + 0.0:.2f}" for figure in figures]
        row = f"| {task} | {entry['seeds']} | {' | '.join(words)} |\n"
        assert row in page, row


def test_the_latency_that_pruning_gains_is_what_was_measured() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "compress.md").read_text(encoding="utf-8").split())
    stored = (ROOT / "benchmarks" / "results" / "pruned_latency_cpu.json").read_text(encoding="utf-8")
    returned: dict[str, list[float]] = {}
    for cell in json.loads(stored)["cells"]:
        returned.setdefault(f"{cell['model']} {cell['type']}", []).append(cell["returned"])
    words = {name: f"{min(each):.2f} to {max(each):.2f}" for name, each in returned.items()}
    assert (
        f"ViT-S gains {words['vit-s16 fp32']} times that share in fp32 and {words['vit-s16 int8']} in `int8`, "
        f"BERT-base {words['bert-base fp32']} and {words['bert-base int8']}" in page
    ), words
    assert min(returned["vit-s16 fp32"] + returned["bert-base fp32"]) >= 0.85, "the share that is aimed at"
