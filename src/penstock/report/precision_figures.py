"""Gradients by power of two beside what fp16 can hold, as in Micikevicius et al., ICLR 2018, figure 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.report.chart import SMALL, WIDTH, Entry, Plot, Scale, legend, text_width
from penstock.report.svg import Canvas

_LEFT, _RIGHT, _TOP, _BOTTOM = 92.0, 16.0, 62.0, 362.0
_LOWEST, _HIGHEST = -40, 16
"""The first and the end of the exponents with a bin each; what is outside shares one bin at each end."""
_FARTHEST = -100
_SMALLEST, _NORMAL, _LARGEST = -24, -14, 16
"""Exponents at which fp16 ends: its smallest number, its smallest with all 11 bits, and (65,504) its largest."""
_ROUNDS_AWAY = -25
"""Below this exponent fp16 rounds to zero."""
_FLOOR = 1e-7
_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of all values in a set of gradients."""

    bins: Mapping[int, float]
    """By exponent e: those with a magnitude in [2^e, 2^(e+1))."""
    zero: float
    wrong: float
    """Infinite, or not a number."""


def gradient_figure(shares: Shares, *, scale: float | None, title: str, alone: bool = False) -> str:
    """Share of the values in each bin, on a logarithmic axis, coloured by what becomes of them in fp16.

    With a loss scale, a power of two, also by what it saves; a second band then shows what fp16 holds under it.
    Raises ValueError where there are no values.
    """
    present = [share for share in (*shares.bins.values(), shares.zero, shares.wrong) if share > 0]
    if not present:
        raise ValueError("A figure of gradients needs at least one value.")
    shift = 0 if scale is None else round(math.log2(scale))
    low = max(_FARTHEST, min(_LOWEST, 4 * ((_ROUNDS_AWAY - shift) // 4 - 1)))
    last = _HIGHEST + (3 if shares.wrong else 1)
    floor = 10.0 ** max(math.floor(math.log10(min(present))), round(math.log10(_FLOOR)))
    # Left of the bins are the zeros, a gap, and a bar of all values that are smaller than the bins.
    x = Scale(low - 3, last, _LEFT, WIDTH - _RIGHT)
    plot = Plot(Canvas(WIDTH), x, Scale(min(floor, 0.01), 1.0, _BOTTOM, _TOP, log=True))
    _axes(plot, low, wrong=shares.wrong > 0)
    _bins(plot, shares, low, shift)
    _limits(plot)
    _band(plot, low, 0, "fp16 holds", _BOTTOM + 40)
    if scale is not None:
        _band(plot, low, shift, f"at loss scale {_power(shift)}", _BOTTOM + 66)
    entries = [Entry("held by fp16", "--accent"), Entry("held with fewer bits", "--soft")]
    entries += [Entry("saved by the loss scale", "--c1")] if scale is not None else []
    entries += [Entry("lost or infinite", "--bad"), Entry("zero in fp32 too", "--base")]
    below = _BOTTOM + (74 if scale is None else 100)
    plot.canvas.height = legend(plot.canvas, entries, _LEFT, below, WIDTH - _LEFT) - 6
    return plot.canvas.svg(title, _said(shares, shift), alone=alone)


def _axes(plot: Plot, low: int, *, wrong: bool) -> None:
    decades = [10.0**-d for d in range(round(-math.log10(plot.y.low)) + 1)]
    plot.y_axis("", decades, lambda s: f"{100 * s:.{max(0, round(-math.log10(s)) - 2)}f} %")
    middle = (_TOP + _BOTTOM) / 2
    plot.canvas.text(16, middle, "share of the values", anchor="middle", fill="--muted", rotate=-90)
    plot.x_axis("", range(low, _HIGHEST + 1, 4), lambda exponent: _power(int(exponent)))
    for place, words in [(low - 2.5, "0")] + ([(_HIGHEST + 2.5, "inf")] if wrong else []):
        plot.canvas.text(plot.x(place), _BOTTOM + 19, words, anchor="middle", fill="--muted", size=SMALL)


def _bins(plot: Plot, shares: Shares, low: int, shift: int) -> None:
    def bar(place: int, share: float, fill: str, words: str) -> None:
        if share > 0:
            left, right = plot.x(place) + 1, plot.x(place + 1) - 1
            top = min(plot.y(max(share, plot.y.low)), _BOTTOM - 1.5)
            tip = f"{words}: {percent(share)}"
            plot.canvas.rect(left, top, right - left, _BOTTOM - top, fill=fill, radius=1.5, tip=tip)

    def between(first: int, end: int) -> float:
        return sum(share for exponent, share in shares.bins.items() if first <= exponent < end)

    bar(low - 3, shares.zero, "--base", "zero")
    bar(low - 1, between(-10_000, low), "--bad", f"below {_power(low)}")
    for exponent in range(low, _HIGHEST):
        words = f"{_power(exponent)} to {_power(exponent + 1)}"
        bar(exponent, shares.bins.get(exponent, 0.0), _fate(exponent, shift), words)
    bar(_HIGHEST, between(_HIGHEST, 10_000), _fate(_HIGHEST, shift), f"from {_power(_HIGHEST)}")
    bar(_HIGHEST + 2, shares.wrong, "--bad", "infinite or not a number")


def _fate(exponent: int, shift: int) -> str:
    """The colour of a bin: lost or infinite, saved by the scale, short of bits, or whole."""
    if not _ROUNDS_AWAY <= exponent + shift < _LARGEST:
        return "--bad"
    if not _ROUNDS_AWAY <= exponent < _LARGEST:
        return "--c1"
    return "--soft" if exponent < _NORMAL else "--accent"


def _limits(plot: Plot) -> None:
    for exponent, number, words in (
        (_SMALLEST, _power(_SMALLEST), "smallest fp16"),
        (_NORMAL, _power(_NORMAL), "smallest normal"),
        (_LARGEST, "65,504", "largest fp16"),
    ):
        x = plot.x(exponent)
        plot.canvas.line(x, _TOP - 8, x, _BOTTOM, stroke="--ink", dash="4 3")
        x = min(x, WIDTH - 4 - text_width(words, SMALL) / 2)  # the last one stands near the edge
        plot.canvas.text(x, _TOP - 26, number, anchor="middle", bold=True)
        plot.canvas.text(x, _TOP - 12, words, anchor="middle", size=SMALL, fill="--muted")


def _band(plot: Plot, low: int, shift: int, words: str, y: float) -> None:
    """What fp16 holds of the unscaled values, when they are multiplied by 2^shift first."""

    def x(exponent: int) -> float:
        return plot.x(min(max(exponent - shift, low - 1), _HIGHEST + 1))

    for first, last, fill, note in (
        (_SMALLEST, _NORMAL, "--soft", ", with fewer bits"),
        (_NORMAL, _LARGEST, "--accent", ""),
    ):
        tip = f"{_power(first - shift)} to {_power(last - shift)}{note}"
        plot.canvas.rect(x(first), y, x(last) - x(first), 12, fill=fill, radius=2, tip=tip)
    if x(_SMALLEST) - _LEFT > 130:
        plot.canvas.text(x(_SMALLEST) - 8, y + 10.5, words, anchor="end", size=SMALL, fill="--muted")
    else:
        plot.canvas.text(x(_LARGEST) + 8, y + 10.5, words, size=SMALL, fill="--muted")


def _said(shares: Shares, shift: int) -> str:
    def between(low: int, high: int) -> str:
        return percent(sum(share for exponent, share in shares.bins.items() if low <= exponent < high))

    far = 10_000
    text = (
        f"zero {percent(shares.zero)}; lost in fp16 {between(-far, _ROUNDS_AWAY)}; with fewer bits "
        f"{between(_ROUNDS_AWAY, _NORMAL)}; whole {between(_NORMAL, _LARGEST)}; infinite {between(_LARGEST, far)}"
    )
    if shift:
        text += f"; lost at loss scale {_power(shift)}: {between(-far, _ROUNDS_AWAY - shift)}"
    return text


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(_POWERS)}"


def percent(share: float) -> str:
    """A share in per cent, with two decimals or as many as its first digit needs: what is not zero never reads so."""
    if share == 0.0:
        return "0 %"
    decimals = max(2, math.ceil(-math.log10(abs(100 * share)) - 1e-9))
    return f"{100 * share:.{decimals}f} %"
