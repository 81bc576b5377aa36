"""Notebooks show of predictions what pages show."""

from __future__ import annotations

import re

from penstock.config.machine import load_machine
from penstock.config.model import preset
from penstock.planner.explain import bends
from penstock.planner.search import Layouts, explore
from penstock.planner.show import SHOWN


def test_a_search_and_its_predictions_are_cells_of_a_notebook() -> None:
    found = explore(preset("vit-b16"), load_machine("a100-80g"), 4, global_batch=512, keep=None)
    cell = found._repr_html_()
    assert cell.count("<svg") == 4  # time and memory, for a screen and a telephone
    for one in found[:SHOWN]:
        assert one.plan.line() in cell
        assert f"{one.iteration_seconds:.4g}" in cell
    single = found[0]._repr_html_()
    assert found[0].plan.line() in single
    assert f"{found[0].mfu:.1%}" in single
    for html in (cell, single):
        assert not re.search(r"<script|https?:|src=|href=", html)


def test_a_search_that_found_nothing_says_so() -> None:
    assert "No layout fits" in Layouts(tried=3, too_large=3)._repr_html_()


# What `penstock plan` says of a layout in sentences.


def test_the_curve_of_devices_says_why_it_bends() -> None:
    perfect = [(8, 64, {"gemm": 4.0}), (16, 64, {"gemm": 2.0})]
    assert bends(perfect) == [
        "Each sample takes nearly the same device time on all these numbers of devices."
    ]
    bent = [*perfect, (32, 64, {"gemm": 1.0, "bubble": 0.5, "data": 0.1})]
    (words,) = bends(bent)
    assert (
        words == "From 16 to 32 devices a sample takes 60% more device time, most of it for pipeline bubble."
    )
    # Devices by their samples: twice the batch in twice the time is no bend.
    assert bends([perfect[0], (8, 128, {"gemm": 8.0})]) == bends(perfect)
