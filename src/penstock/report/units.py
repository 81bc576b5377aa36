"""Figures in the units that people use: 6.9 h and not 0.2863 days, 38 kWh and not 0.03848 MWh."""

from __future__ import annotations

GIB = 2**30
_TIMES = (
    (86400.0 * 365.25, "years"),
    (86400.0, "days"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
)
_ENERGIES = ((1e9, "GWh"), (1e6, "MWh"), (1e3, "kWh"), (1.0, "Wh"))


def rounded(value: float, digits: int = 2) -> str:
    """Two digits, or more, and all digits before the decimal point: 6.9, 38, 203,709."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) - 0.05 else f"{value:,.0f}"


def duration(seconds: float, digits: int = 2) -> str:
    """Seconds in the largest unit of which there is at least one: `6.9 h`, `8.3 days`. Up to 48 hours are hours."""
    for size, unit in _TIMES:
        if seconds >= size * (2 if unit in ("days", "years") else 1):
            return f"{rounded(seconds / size, digits)} {unit}"
    return f"{rounded(seconds * 1e3, digits)} ms"


def energy(watt_hours: float) -> str:
    """Watt hours in the largest unit of which there is at least one: `38 kWh`."""
    for size, unit in _ENERGIES:
        if watt_hours >= size:
            return f"{rounded(watt_hours / size)} {unit}"
    return f"{rounded(watt_hours)} Wh"


def money(dollars: float) -> str:
    """`US$ 137`; cents below ten dollars."""
    return f"US$ {dollars:,.2f}" if dollars < 10 else f"US$ {dollars:,.0f}"
