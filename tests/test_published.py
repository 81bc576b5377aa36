"""docs/reference/published.md: each published figure is recomputed, and the page and its picture are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.modules import loaded

published = loaded(Path(__file__).parent.parent / "tools" / "published.py")


def test_the_page_of_published_figures_is_up_to_date() -> None:
    assert published.PATH.read_text(encoding="utf-8") == published.page(), "run make reference"
    assert published.FIGURE.read_text(encoding="utf-8") == published.figure(), "run make reference"


@pytest.mark.parametrize("section", ["GPT-3's arithmetic", "Megatron-LM"])
def test_arithmetic_and_scaling_come_out(section: str) -> None:
    for row in published.SECTIONS[section]():
        assert row.ratio == pytest.approx(1, abs=0.12), row


def test_the_ladder_of_vit_h_climbs_as_the_article_says() -> None:
    rungs = published.climb()
    rates = [rungs[name].model_flops_per_second_per_gpu for name, *_ in published.RUNGS]
    assert rates == pytest.approx(sorted(rates), rel=0.005)
    assert all(rung.fits for rung in rungs.values())
    exact, half = (rungs[base].model_flops_per_second_per_gpu for base in published._BASES)
    for name, gain in published._ARTICLE.items():  # its baseline is between the two
        rate = rungs[name].model_flops_per_second_per_gpu
        assert rate / half < gain < rate / exact
    assert rate / exact == pytest.approx(published._ARTICLE[name], rel=0.18)
