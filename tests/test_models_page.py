"""docs/reference/models.md says what presets count, which tests hold it, and what was measured beside transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from helpers.modules import loaded
from helpers.sweeps import sweep
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.describe import describe, totals
from penstock.planner.memory import pass_bytes

ROOT = Path(__file__).parent.parent


models = loaded(ROOT / "tools" / "models.py")


def test_the_page_of_models_is_up_to_date() -> None:
    assert models.PATH.read_text(encoding="utf-8") == models.page(), "run make reference"


def test_every_preset_is_counted_once_and_written_once() -> None:
    counts, _, forms = models.page().partition("## How presets are written")
    counted = [line for line in counts.splitlines() if " blocks of width " in line]
    for name in PRESETS:
        assert len([line for line in counted if line.startswith(f"| `{name}` |")]) == 1, name
        assert len([line for line in forms.splitlines() if f"`{name}`" in line]) == 1, name
    assert len(counted) == len(PRESETS)


def test_the_page_of_unified_models_counts_the_sizes_of_the_articles() -> None:
    page = (ROOT / "docs" / "how-to" / "unified.md").read_text(encoding="utf-8")
    for name in ("ernie-vilg2-24b", "ernie3-10b", "multimodal-large", "translator-moe-128"):
        assert f"| `{name}` | {totals(PRESETS[name]).parameters:,} |" in page


def test_every_sample_keeps_as_much_as_the_page_says() -> None:
    """Each preset at one of two levels, on one of two devices."""
    ways = itertools.cycle(itertools.product(("O0", "O1"), ("cpu", "cuda")))
    for (name, model), (precision, device) in zip(PRESETS.items(), ways):
        one, nine = (Plan(precision=precision, micro_batch=samples) for samples in (1, 9))  # type: ignore[arg-type]
        more = [pass_bytes(describe(model, plan, device), plan).kept for plan in (one, nine)]
        assert more[1] - more[0] == pytest.approx(8 * models.sample_bytes(model, precision, device)), name


@pytest.mark.slow
@pytest.mark.parametrize("turn", sweep(range(4), [0]))
def test_stored_figures_are_those_of_a_run(turn: int) -> None:
    """Of a quarter of the classes at a time."""
    pytest.importorskip("transformers")
    parity = loaded(ROOT / "benchmarks" / "transformers_parity.py")
    stored = json.loads(models.RESULTS.read_text(encoding="utf-8"))
    classes = list(parity.classes())
    assert {name: row["model_type"] for name, row in stored["differences"].items()} == {
        architecture: model_type for model_type, architecture, _ in classes
    }
    for _, architecture, options in classes[turn::4]:
        found = parity.differences(architecture, options, draws=1)
        for way in ("read", "written"):
            assert 0 <= found[way] < 1e-5, (architecture, way)
            assert stored["differences"][architecture][way] < 1e-5, (architecture, way)
