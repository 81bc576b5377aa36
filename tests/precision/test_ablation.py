"""The ablation shows what it should, and its page says what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.modules import loaded

ROOT = Path(__file__).parents[2]
WHOLE = ("O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "ablation.py")


@pytest.fixture(scope="module")
def found(tool: ModuleType) -> dict[str, Any]:
    document: dict[str, Any] = tool.document()
    return document


def test_the_page_and_its_figure_are_up_to_date(tool: ModuleType, found: dict[str, Any]) -> None:
    assert tool.PATH.read_text(encoding="utf-8") == tool.page(found), "run make reference"
    assert tool.FIGURE.read_text(encoding="utf-8") == tool.figure(found), "run make reference"
    for task in tool.TITLES:
        curve = tool.FIGURE.with_stem(f"{tool.FIGURE.stem}-{task}").read_text(encoding="utf-8")
        assert curve == tool.curves(found, task), "run make reference"


@pytest.mark.parametrize("task", ["digits", "bytes"])
def test_whole_levels_lie_within_the_noise_and_crippled_ones_do_not(
    tool: ModuleType, found: dict[str, Any], task: str
) -> None:
    of = tool.losses(found, task)
    noise, base = tool.noise(of), of["O0"]
    assert len(base) >= 5
    for variant in WHOLE:
        assert None not in of[variant], variant
        assert abs(statistics.fmean(tool.differences(of, variant))) < noise, variant
        assert min(base) - noise < statistics.fmean(of[variant]) < max(base) + noise, variant
    for variant in ("O2 fp16, no loss scale", "O3 bf16"):
        assert statistics.fmean(tool.differences(of, variant)) > 1.5 * noise, variant
    assert of["O2 fp16, no master weights"] == [None] * len(base)
    assert of["O3 fp16"] == [None] * len(base)
    # With the same seed, each of these ends worse than O0, and worse than with what was left out of it.
    for variant in ("O2 fp16, no loss scale", "O2 bf16, no master weights", "O3 bf16"):
        worse, kept = tool.differences(of, variant), tool.differences(of, "O2 bf16")
        assert all(one > max(other, 0.0) for one, other in zip(worse, kept, strict=True)), variant
