"""Figures in everyday units: 6.9 h and not 0.2863 days, 38 kWh and not 0.03848 MWh."""

from __future__ import annotations

GIB = 2**30
_TIMES = {"years": 86400 * 365.25, "days": 86400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3}
_ENERGIES = {"GWh": 1e9, "MWh": 1e6, "kWh": 1e3, "Wh": 1}
_MASSES = {"t": 1e6, "kg": 1e3, "g": 1}


def rounded(value: float, digits: int = 2) -> str:
    """Two digits, or as many as requested, and all digits before the decimal point: 6.9, 38, 203,709."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) - 0.05 else f"{value:,.0f}"


def duration(seconds: float, digits: int = 2) -> str:
    """Seconds in the largest unit in which they are at least one: `6.9 h`, `8.3 days`. Up to 48 hours are hours."""
    longest = (unit for unit, size in _TIMES.items() if seconds >= size * (1 + (unit in ("days", "years"))))
    unit = next(longest, "ms")
    return f"{rounded(seconds / _TIMES[unit], digits)} {unit}"


def energy(watt_hours: float) -> str:
    """Watt hours in the largest unit in which they are at least one: `38 kWh`."""
    return _in_units(watt_hours, _ENERGIES)


def mass(grams: float) -> str:
    """Grams in the largest unit in which they are at least one: `1.2 t`."""
    return _in_units(grams, _MASSES)


def _in_units(value: float, units: dict[str, float]) -> str:
    unit = next((unit for unit, size in units.items() if value >= size), [*units][-1])
    return f"{rounded(value / units[unit])} {unit}"


def scientific(value: float) -> str:
    """Four digits and a power of ten: `4.511e18`."""
    return f"{value:.4g}".replace("e+", "e")


def money(dollars: float) -> str:
    """`US$ 137`; cents below ten dollars."""
    return f"US$ {dollars:,.2f}" if dollars < 10 else f"US$ {dollars:,.0f}"
