"""The figure has a cell for every action at its time, says what it shows, and reads in both colour schemes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from penstock.errors import ConfigError
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


def test_too_much_for_a_page_is_refused_with_the_remedy() -> None:
    result = simulate(generate("1f1b", 32, 400))
    with pytest.raises(ConfigError, match=r"25,600 actions, more than 20,000; draw a schedule of fewer"):
        schedule_figure(result, title="Too much")
