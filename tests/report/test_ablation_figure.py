"""The figure of runs with parts left out."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from penstock.report.ablation_figure import Panel, ablation_figure

LOSSES = {"whole": [1.0, 1.2, 1.1], "less": [1.05, 1.6, None], "none": [None, None, None]}


def test_each_run_is_a_dot_within_the_noise_or_outside_or_a_word() -> None:
    svg = ablation_figure([Panel(title="A task", baseline="whole", losses=LOSSES)], title="Runs", alone=True)
    ElementTree.fromstring(svg)
    tipped = re.findall(r'<circle [^>]*style="fill:var\((--\w+)\)"><title>([^<]*)</title>', svg)
    assert tipped == [
        ("--accent", "whole, seed 0: +0.0000"),
        ("--accent", "whole, seed 1: +0.0000"),
        ("--accent", "whole, seed 2: +0.0000"),
        ("--accent", "less, seed 0: +0.0500"),
        ("--bad", "less, seed 1: +0.4000"),
    ]
    assert "lost, 1 of 3" in svg
    assert "lost, 3 of 3" in svg
    assert "A task: whole 1.1000, less 1.3250, none lost" in svg


def test_panels_have_the_same_rows() -> None:
    panels = [
        Panel(title=name, baseline="whole", losses=dict(list(LOSSES.items())[: 2 + (name == "a")]))
        for name in "ab"
    ]
    with pytest.raises(ValueError, match="same variants"):
        ablation_figure(panels, title="Runs")
