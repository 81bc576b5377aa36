"""The figure has a cell for every action at its time, says what it shows, and reads in both colour schemes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.report.chart import style
from penstock.report.schedule_figure import schedule_figure
from penstock.schedules import SCHEDULE_NAMES, Costs, generate, simulate

SVG = "{http://www.w3.org/2000/svg}"


def cells(figure: str) -> dict[str, ET.Element]:
    """Each action's rectangle, by the tip it shows."""
    found: dict[str, ET.Element] = {}
    for rect in ET.fromstring(figure).iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None and tip.text:
            found[tip.text.split(":")[0]] = rect
    return found


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_action_has_a_cell_in_proportion_to_its_time(name: Any) -> None:
    result = simulate(
        generate(name, 3, 6, 2 if name == "interleaved" else 1),
        Costs(forward=10, backward_input=11, backward_weight=7, transfer=1),
    )
    found = cells(schedule_figure(result, title="A schedule", alone=True))
    spans = result.timeline()
    assert set(found) == {str(span.action) for span in spans}
    left = float(found["0F0"].attrib["x"])
    scale = float(found["0F0"].attrib["width"]) / 10
    for span in spans:
        rect = found[str(span.action)]
        assert float(rect.attrib["x"]) == pytest.approx(left + float(span.start) * scale, rel=0.01, abs=0.3)
        assert float(rect.attrib["width"]) == pytest.approx(float(span.end - span.start) * scale, rel=0.02)
    rows = {float(found[f"{stage}F0"].attrib["y"]) for stage in range(3)}
    assert len(rows) == 3


def test_kinds_and_chunks_differ_in_colour_and_all_colours_follow_the_scheme() -> None:
    result = simulate(generate("interleaved", 2, 4, 3))
    figure = schedule_figure(result, title="Interleaved", alone=True)
    found = cells(figure)
    fills = [
        re.search(r"fill:([^;]+)", found[word].attrib["style"])[1] for word in ("0F0", "2F0", "4F0", "0B0")
    ]  # type: ignore[index]
    assert len(set(fills)) == 4
    used = set(re.findall(r"var\((--\w+)\)", figure))
    light, dark = style("svg").split("@media (prefers-color-scheme:dark)")
    assert used
    assert all(f"{variable}:" in light and f"{variable}:" in dark for variable in used)
    assert not re.search(r"(fill|stroke):#", figure.split("</style>")[1])


def test_it_says_in_words_what_it_shows() -> None:
    result = simulate(
        generate("zb-h1", 4, 8), Costs(forward=2, backward_input=2, backward_weight=2, activation=1.5)
    )
    figure = schedule_figure(result, title="ZB-H1 & friends", unit="ms", memory_unit="GiB")
    assert "<title>ZB-H1 &amp; friends</title>" in figure
    assert "8 micro-batches through 4 stages on 4 ranks: 54.0 ms, of which 11.1 % are idle." in figure
    words = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
    for expected in (
        "bubble 11.1 % of the ranks' time",
        "W: weight gradient",
        "time [ms]",
        "holds GiB",
        "6",
        "rank 3",
    ):
        assert expected in [word.replace("&#x27;", "'") for word in words]


def test_too_much_for_a_page_is_refused_with_the_remedy() -> None:
    result = simulate(generate("1f1b", 32, 400))
    with pytest.raises(ConfigError, match=r"25,600 actions, more than 20,000; draw a schedule of fewer"):
        schedule_figure(result, title="Too much")
