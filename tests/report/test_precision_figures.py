"""The figure of gradients: every bin at its place, in the colour of its fate, with fp16's limits where they are."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from penstock.precision.histogram import HIGH, LOW, Histogram
from penstock.report.precision_figures import gradient_figure, percent

SVG = "{http://www.w3.org/2000/svg}"


def histogram(bins: dict[int, float], zero: float, wrong: float) -> Histogram:
    """So many of 10,000 values, given as shares."""
    counts = tuple(round(10_000 * bins.get(exponent, 0.0)) for exponent in range(LOW, HIGH + 1))
    return Histogram(counts=counts, zeros=round(10_000 * zero), wrong=round(10_000 * wrong), largest=1.0)


def drawn(shares: Histogram, scale: float | None = None) -> str:
    return gradient_figure(shares, scale=scale, title="Gradients", alone=True)


def bars(figure: str) -> dict[str, ET.Element]:
    """Each bar by what it says it covers."""
    found = {}
    for rect in ET.fromstring(figure).iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None and tip.text and ":" in tip.text:
            found[tip.text.partition(":")[0]] = rect
    return found


def test_the_axis_reaches_what_a_large_scale_saves() -> None:
    shares = histogram({-50: 0.5, -20: 0.5}, 0.0, 0.0)
    assert "2⁻⁵⁰ to 2⁻⁴⁹" in bars(drawn(shares, 2.0**26))
    assert "below 2⁻⁴⁰" in bars(drawn(shares, 1.0))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        gradient_figure(histogram({}, 0.0, 0.0), scale=None, title="x")


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (1.0, "100.00 %"), (0.0156, "1.56 %"), (2e-5, "0.002 %"), (1.2e-7, "0.00001 %")],
)
def test_what_is_not_zero_never_reads_as_zero(share: float, words: str) -> None:
    assert percent(share) == words
