"""The figure of gradients: every bin at its place, in the colour of its fate, with fp16's limits where they are."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from penstock.precision.histogram import HIGH, LOW, Histogram
from penstock.report.chart import style
from penstock.report.precision_figures import gradient_figure, percent

SVG = "{http://www.w3.org/2000/svg}"
BINS = {-60: 0.0001, -45: 0.0009, -30: 0.109, -25: 0.1, -20: 0.2, -14: 0.25, 0: 0.03, 15: 0.005, 16: 0.005}


def histogram(bins: dict[int, float], zero: float, wrong: float) -> Histogram:
    """So many of 10,000 values, given as shares."""
    counts = tuple(round(10_000 * bins.get(exponent, 0.0)) for exponent in range(LOW, HIGH + 1))
    return Histogram(counts=counts, zeros=round(10_000 * zero), wrong=round(10_000 * wrong), largest=1.0)


SHARES = histogram(BINS, zero=0.25, wrong=0.05)


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


def fill(rect: ET.Element) -> str:
    found = re.search(r"fill:var\((--\w+)\)", rect.attrib["style"])
    assert found is not None
    return found[1]


def test_every_bin_stands_at_its_power_with_the_height_of_its_share() -> None:
    found = bars(drawn(SHARES))
    assert len(found) == 10  # what lies below 2^-40 shares a bar
    at = {
        power: float(found[f"{power} to {after}"].attrib["x"])
        for power, after in (("2⁻³⁰", "2⁻²⁹"), ("2⁻²⁰", "2⁻¹⁹"), ("2⁰", "2¹"))
    }
    assert (at["2⁻²⁰"] - at["2⁻³⁰"]) * 2 == pytest.approx(at["2⁰"] - at["2⁻²⁰"], rel=0.01)
    height = {name: float(rect.attrib["height"]) for name, rect in found.items()}
    # Logarithmic: equal ratios are equal differences.
    assert height["2⁻²⁰ to 2⁻¹⁹"] - height["2⁻²⁵ to 2⁻²⁴"] == pytest.approx(
        math.log(2) / math.log(10) * (height["2⁻²⁵ to 2⁻²⁴"] - height["2¹⁵ to 2¹⁶"]) / math.log10(20), abs=0.2
    )
    assert height["zero"] == height["2⁻¹⁴ to 2⁻¹³"]
    assert height["from 2¹⁶"] == height["2¹⁵ to 2¹⁶"]


def test_colours_tell_what_becomes_of_the_values() -> None:
    plain = {k: fill(v) for k, v in bars(drawn(SHARES)).items()}
    lost, fewer, whole = "--bad", "--soft", "--accent"
    assert plain["2⁻³⁰ to 2⁻²⁹"] == plain["from 2¹⁶"] == plain["below 2⁻⁴⁰"] == lost
    assert plain["2⁻²⁵ to 2⁻²⁴"] == plain["2⁻²⁰ to 2⁻¹⁹"] == fewer
    assert plain["2⁻¹⁴ to 2⁻¹³"] == plain["2¹⁵ to 2¹⁶"] == whole
    assert plain["zero"] == "--base"
    assert plain["infinite or not a number"] == lost
    scaled = {k: fill(v) for k, v in bars(drawn(SHARES, 2.0**10)).items()}
    assert scaled["2⁻³⁰ to 2⁻²⁹"] == "--c1"
    assert scaled["below 2⁻⁴⁰"] == lost
    assert scaled["2¹⁵ to 2¹⁶"] == lost  # too large for this scale
    assert scaled["2⁻²⁰ to 2⁻¹⁹"] == fewer


def test_limits_and_bands() -> None:
    figure = drawn(SHARES, 2.0**10)
    words = [text.text for text in ET.fromstring(figure).iter(f"{SVG}text")]
    for expected in (
        "2⁻²⁴",
        "2⁻¹⁴",
        "65,504",
        "fp16 holds",
        "at loss scale 2¹⁰",
        "100 %",
        "share of the values",
    ):
        assert expected in words
    tips = [title.text or "" for title in ET.fromstring(figure).iter(f"{SVG}title")]
    assert "2⁻²⁴ to 2⁶" in tips  # the second band's whole part: 2^-14 and 2^16, ten powers further down
    assert "2⁻³⁴ to 2⁻²⁴, with fewer bits" in tips
    assert "at loss scale" not in gradient_figure(SHARES, scale=None, title="x")
    description = re.search(r"<desc>(.*)</desc>", figure)
    assert description is not None
    assert "lost in fp16 11.00 %" in description[1]
    assert "lost at loss scale 2¹⁰: 0.10 %" in description[1]


def test_the_axis_reaches_what_a_large_scale_saves() -> None:
    shares = histogram({-50: 0.5, -20: 0.5}, 0.0, 0.0)
    assert "2⁻⁵⁰ to 2⁻⁴⁹" in bars(drawn(shares, 2.0**26))
    assert "below 2⁻⁴⁰" in bars(drawn(shares, 1.0))


def test_all_colours_follow_the_scheme() -> None:
    figure = drawn(SHARES, 4.0)
    light, dark = style("svg").split("@media (prefers-color-scheme:dark)")
    used = set(re.findall(r"var\((--\w+)\)", figure))
    assert used
    assert all(f"{variable}:" in light and f"{variable}:" in dark for variable in used)
    assert not re.search(r"(fill|stroke):#", figure.split("</style>")[1])


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        gradient_figure(histogram({}, 0.0, 0.0), scale=None, title="x")


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (1.0, "100.00 %"), (0.0156, "1.56 %"), (2e-5, "0.002 %"), (1.2e-7, "0.00001 %")],
)
def test_what_is_not_zero_never_reads_as_zero(share: float, words: str) -> None:
    assert percent(share) == words
