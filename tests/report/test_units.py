"""Figures as people say them."""

from __future__ import annotations

import pytest

from penstock.report.units import duration, energy, money, rounded


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2863 * 86400, "6.9 h"), (47 * 3600, "47 h"), (8.289 * 86400, "8.3 days"), (41 * 60, "41 min"),
        (59.6, "60 s"), (1.0, "1 s"), (0.064, "64 ms"), (0.0005, "0.5 ms"), (1000 * 86400, "2.7 years"), (0.0, "0 ms"),
    ],
)  # fmt: skip
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_energy_and_money() -> None:
    assert [energy(watt_hours) for watt_hours in (38480.0, 142.6e6, 3.2e9, 12.0, 0.5)] == [
        "38 kWh", "143 MWh", "3.2 GWh", "12 Wh", "0.5 Wh",
    ]  # fmt: skip
    assert [money(dollars) for dollars in (137.4, 407419.2, 0.8819)] == ["US$ 137", "US$ 407,419", "US$ 0.88"]


def test_a_figure_near_ten_has_no_digit_too_many() -> None:
    assert [rounded(value) for value in (9.94, 9.96, 203709.4)] == ["9.9", "10", "203,709"]
