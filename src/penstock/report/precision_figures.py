"""Gradients by power of two compared with the range of fp16, as in Micikevicius et al., ICLR 2018, figure 3."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from penstock.report.chart import SMALL, WIDE, Chart, Entry, Scale, text_width

if TYPE_CHECKING:
    from penstock.precision.histogram import Histogram

_LOWEST, _HIGHEST = -40, 16
"""The first exponent with a bin and the end of these exponents; values outside share one bin at each end."""
_FARTHEST = -100
_SMALLEST, _NORMAL, _LARGEST = -24, -14, 16
"""Limits of fp16 as exponents: its smallest number, its smallest with all 11 bits, and (65,504) its largest."""
_ROUNDS_AWAY = -25
"""Below this exponent fp16 rounds to zero."""
_FLOOR = 1e-7
_FAR = 10_000
_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def gradient_figure(histogram: Histogram, *, scale: float, title: str) -> str:
    """Share of the values in each bin, on a logarithmic axis, coloured by what happens to them in fp16, and by whether
    a loss scale, a power of two, saves them; two bands show the range of fp16 without and with it.

    One `<svg>` as a separate file. Raises ValueError if there are no values.
    """
    values = histogram.values
    if not values:
        raise ValueError("A figure of gradients needs at least one value.")
    present = [count / values for count in (*histogram.counts, histogram.zeros, histogram.wrong) if count > 0]
    shift = round(math.log2(scale))
    low = max(_FARTHEST, min(_LOWEST, 4 * ((_ROUNDS_AWAY - shift) // 4 - 1)))
    floor = 10.0 ** max(math.floor(math.log10(min(present))), round(math.log10(_FLOOR)))
    chart = Chart(WIDE)
    entries = [
        Entry("held by fp16", "--accent"), Entry("held with fewer bits", "--soft"),
        Entry("saved by the loss scale", "--c1"), Entry("lost or infinite", "--bad"),
        Entry("zero in fp32 too", "--base"),
    ]  # fmt: skip
    top = chart.head("share of the values", entries) + 34
    # To the left of the bins: the zeros, a gap, and a bar of all values that are smaller than the bins.
    chart.x = Scale(low - 3, _HIGHEST + (3 if histogram.wrong else 1), 92.0, WIDE - 16.0)
    chart.y = Scale(min(floor, 0.01), 1.0, top + 270, top, log=True)
    decades = [10.0**-d for d in range(round(-math.log10(chart.y.low)) + 1)]
    chart.y_axis(decades, lambda s: f"{100 * s:.{max(0, round(-math.log10(s)) - 2)}f} %")
    _bins(chart, histogram, low, shift)
    chart.x_axis("", range(_HIGHEST, low - 1, -4), lambda exponent: _power(int(exponent)))
    _limits(chart)
    for row, (by, words) in enumerate([(0, "fp16 holds"), (shift, f"at loss scale {_power(shift)}")]):
        _band(chart, low, by, words, chart.y.start + 22 * (row + 1) + 10)
    chart.height = chart.y.start + 74
    return chart.svg(title, _description(histogram, shift), alone=True)


def _bins(chart: Chart, histogram: Histogram, low: int, shift: int) -> None:
    bottom = chart.y.start
    bars: list[tuple[float, float, str, str]] = [
        (low - 3, histogram.zeros / histogram.values, "--base", "zero"),
        (low - 1, histogram.between(-_FAR, low), "--bad", f"below {_power(low)}"),
    ]
    for exponent in range(low, _HIGHEST):
        words = f"{_power(exponent)} to {_power(exponent + 1)}"
        bars.append((exponent, histogram.between(exponent, exponent + 1), _fate(exponent, shift), words))
    above = histogram.between(_HIGHEST, _FAR)
    bars.append((_HIGHEST, above, _fate(_HIGHEST, shift), f"from {_power(_HIGHEST)}"))
    bars.append((_HIGHEST + 2, histogram.wrong / histogram.values, "--bad", "infinite or not a number"))
    for place, share, fill, words in bars:
        if share > 0:
            top = min(chart.y(max(share, chart.y.low)), bottom - 1.5)
            tip = f"{words}: {percent(share)}"
            chart.box(chart.x(place) + 1, bottom, chart.x(place + 1) - 1, top, fill=fill, radius=1.5, tip=tip)
    for place, _, _, words in bars[:: len(bars) - 1]:
        if words == "zero" or histogram.wrong:
            name = "0" if words == "zero" else "inf"
            chart.text(chart.x(place + 0.5), bottom + 19, name, anchor="middle", fill="--muted", size=SMALL)


def _fate(exponent: int, shift: int) -> str:
    """Colour of a bin: lost or infinite, saved by the scale, short of bits, or exact."""
    if not _ROUNDS_AWAY <= exponent + shift < _LARGEST:
        return "--bad"
    if not _ROUNDS_AWAY <= exponent < _LARGEST:
        return "--c1"
    return "--soft" if exponent < _NORMAL else "--accent"


def _limits(chart: Chart) -> None:
    """Draw the limits of fp16, each with its name above."""
    ends = (_SMALLEST, _power(_SMALLEST), "smallest"), (_NORMAL, _power(_NORMAL), "smallest normal")
    for exponent, number, words in [*ends, (_LARGEST, "65,504", "largest")]:
        x, y = chart.x(exponent), chart.y.stop - 14
        chart.line(x, y + 6, x, chart.y.start, stroke="--ink", dash="4 3")
        chart.text(x, y - 13, number, anchor="middle", bold=True, inside=True)
        chart.text(x, y, words, anchor="middle", size=SMALL, fill="--muted", inside=True)


def _band(chart: Chart, low: int, shift: int, words: str, y: float) -> None:
    """Draw the range of unscaled values that fp16 can represent if they are first multiplied by 2^shift."""

    def x(exponent: int) -> float:
        return chart.x(min(max(exponent - shift, low - 1), _HIGHEST + 1))

    for first, last, fill, note in (
        (_SMALLEST, _NORMAL, "--soft", ", with fewer bits"),
        (_NORMAL, _LARGEST, "--accent", ""),
    ):
        tip = f"{_power(first - shift)} to {_power(last - shift)}{note}"
        chart.box(x(first), y, x(last), y + 12, fill=fill, radius=2, tip=tip)
    if x(_SMALLEST) > text_width(words, SMALL) + 12:
        chart.text(x(_SMALLEST) - 8, y + 10.5, words, anchor="end", size=SMALL, fill="--muted")
    else:
        chart.text(x(_LARGEST) + 8, y + 10.5, words, size=SMALL, fill="--muted")


def _description(histogram: Histogram, shift: int) -> str:
    held = [-_FAR, _ROUNDS_AWAY, _NORMAL, _LARGEST, _FAR]
    lost, fewer, whole, infinite = (percent(histogram.between(*ends)) for ends in itertools.pairwise(held))
    text = (
        f"zero {percent(histogram.zeros / histogram.values)}; lost in fp16 {lost}; with fewer bits {fewer}; "
        f"whole {whole}; infinite {infinite}"
    )
    if shift:
        lost = percent(histogram.between(-_FAR, _ROUNDS_AWAY - shift))
        text += f"; lost at loss scale {_power(shift)}: {lost}"
    return text


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(_POWERS)}"


def percent(share: float) -> str:
    """A share in per cent, with two decimals or as many as its first digit needs: only zero is written as zero."""
    if share == 0.0:
        return "0 %"
    decimals = max(2, math.ceil(-math.log10(abs(100 * share)) - 1e-9))
    return f"{100 * share:.{decimals}f} %"
