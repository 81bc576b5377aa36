"""Figures of plans: what they draw, and what they refuse."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from penstock.report.plan_figures import Line, Stack, curves, devices_figure, stacked_bars


def _tips(figure: str) -> list[str]:
    return [
        element.text or ""
        for element in ElementTree.fromstring(figure).iter()
        if element.tag.endswith("title")
    ]


def test_curves_mark_every_point_and_name_every_line() -> None:
    figure = curves(
        [Line(label="first <law>", points=[(10, 1e22), (20, 3e22)]), Line(label="other", points=[(15, 2e22)])],
        title="cost", x_label="size", y_label="FLOPs",
    )  # fmt: skip
    assert _tips(figure)[1:] == ["first <law>: 10, 1e+22", "first <law>: 20, 3e+22", "other: 15, 2e+22"]
    words = [
        element.text for element in ElementTree.fromstring(figure).iter() if element.tag.endswith("text")
    ]
    assert {"size", "FLOPs", "first <law>", "other", "10", "20", "1e+22", "2e+22"} <= set(words)


def test_bars_are_as_long_as_their_parts() -> None:
    figure = stacked_bars(
        [Stack(label="a", parts={"x": 3.0, "y": 1.0}), Stack(label="b", parts={"x": 1.0})],
        title="t", unit="s",
    )  # fmt: skip
    assert {"x: 3 s", "y: 1 s", "x: 1 s"} <= set(_tips(figure))


def test_figures_without_data_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        curves([], title="t", x_label="x", y_label="y")
    with pytest.raises(ValueError, match="at least one point"):
        devices_figure([], title="t", y_label="y")
    with pytest.raises(ValueError, match="at least one bar"):
        stacked_bars([], title="t", unit="s")
