"""Gradients by power of two beside what fp16 can hold, as in Micikevicius et al., ICLR 2018, figure 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.report.figures import WIDTH
from penstock.report.svg import Anchor, Canvas

_LEFT, _RIGHT, _TOP, _HEIGHT, _BANDS = 92.0, 16.0, 62.0, 300.0, 118.0
_LOWEST, _HIGHEST = -40, 16
"""Bins of their own, as exponents of two; what lies outside shares one at each end."""
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


@dataclass(frozen=True, slots=True)
class _Axes:
    low: int
    slot: float
    floor: float
    wrong: bool

    def x(self, exponent: float) -> float:
        """Where a power of two stands. Before the bins are the zeros, a gap, and what is smaller than all bins."""
        return _LEFT + (exponent - self.low + 3) * self.slot

    def y(self, share: float) -> float:
        decades = -math.log10(self.floor)
        return _TOP + _HEIGHT * min(1.0, -math.log10(max(share, self.floor)) / decades)


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
    places = 3 + (_HIGHEST - low) + 1 + (2 if shares.wrong else 0)
    floor = 10.0 ** max(math.floor(math.log10(min(present))), round(math.log10(_FLOOR)))
    axes = _Axes(low, (WIDTH - _LEFT - _RIGHT) / places, min(floor, 0.01), shares.wrong > 0)
    canvas = Canvas(WIDTH, _TOP + _HEIGHT + _BANDS - (0 if scale else 30))
    _grid(canvas, axes)
    _bars(canvas, axes, shares, shift)
    _limits(canvas, axes)
    _band(canvas, axes, 0, "fp16 holds", _TOP + _HEIGHT + 46)
    if scale is not None:
        words = f"at loss scale {_power(shift)}"
        _band(canvas, axes, shift, words, _TOP + _HEIGHT + 76)
    _legend(canvas, scaled=scale is not None)
    return canvas.svg(title, _said(shares, shift), alone=alone)


def _grid(canvas: Canvas, axes: _Axes) -> None:
    decade = 0
    while 10.0**-decade >= axes.floor * 0.99:
        y = axes.y(10.0**-decade)
        canvas.line(_LEFT, y, WIDTH - _RIGHT, y, stroke="--line")
        words = f"{100 * 10.0**-decade:.{max(0, decade - 2)}f} %"
        canvas.text(_LEFT - 8, y + 4, words, anchor="end", fill="--muted", size=11.5)
        decade += 1
    canvas.text(16, _TOP + _HEIGHT / 2, "share of the values", anchor="middle", fill="--muted", rotate=-90)
    y = _TOP + _HEIGHT + 18
    canvas.text(_LEFT + axes.slot / 2, y, "0", anchor="middle", fill="--muted", size=11.5)
    for exponent in range(axes.low, _HIGHEST + 1, 4):
        canvas.line(axes.x(exponent), y - 18, axes.x(exponent), y - 13, stroke="--edge")
        words = _power(exponent)
        canvas.text(axes.x(exponent), y, words, anchor="middle", fill="--muted", size=11.5)
    if axes.wrong:
        canvas.text(axes.x(_HIGHEST + 2.5), y, "inf", anchor="middle", fill="--muted", size=11.5)


def _bars(canvas: Canvas, axes: _Axes, shares: Shares, shift: int) -> None:
    def bar(place: float, share: float, fill: str, words: str) -> None:
        if share > 0:
            top = min(axes.y(share), _TOP + _HEIGHT - 1.5)
            tip = f"{words}: {percent(share)}"
            canvas.rect(place + 1, top, axes.slot - 2, _TOP + _HEIGHT - top, fill=fill, radius=1.5, tip=tip)

    bar(_LEFT, shares.zero, "--base", "zero")
    below = sum(share for exponent, share in shares.bins.items() if exponent < axes.low)
    bar(axes.x(axes.low - 1), below, "--bad", f"below {_power(axes.low)}")
    for exponent in range(axes.low, _HIGHEST):
        words = f"{_power(exponent)} to {_power(exponent + 1)}"
        bar(axes.x(exponent), shares.bins.get(exponent, 0.0), _fate(exponent, shift), words)
    above = sum(share for exponent, share in shares.bins.items() if exponent >= _HIGHEST)
    bar(axes.x(_HIGHEST), above, _fate(_HIGHEST, shift), f"from {_power(_HIGHEST)}")
    bar(axes.x(_HIGHEST + 2), shares.wrong, "--bad", "infinite or not a number")


def _fate(exponent: int, shift: int) -> str:
    """The colour of a bin: lost or infinite, saved by the scale, short of bits, or whole."""
    if not _ROUNDS_AWAY <= exponent + shift < _LARGEST:
        return "--bad"
    if not _ROUNDS_AWAY <= exponent < _LARGEST:
        return "--c1"
    return "--soft" if exponent < _NORMAL else "--accent"


def _limits(canvas: Canvas, axes: _Axes) -> None:
    for exponent, number, words in (
        (_SMALLEST, _power(_SMALLEST), "smallest fp16"),
        (_NORMAL, _power(_NORMAL), "smallest normal"),
        (_LARGEST, "65,504", "largest fp16"),
    ):
        x = axes.x(exponent)
        canvas.line(x, _TOP - 8, x, _TOP + _HEIGHT, stroke="--ink", dash="4 3")
        anchor: Anchor = "end" if exponent == _LARGEST else "middle"
        canvas.text(x, _TOP - 26, number, anchor=anchor, size=12, bold=True)
        canvas.text(x, _TOP - 12, words, anchor=anchor, size=11.5, fill="--muted")


def _band(canvas: Canvas, axes: _Axes, shift: int, words: str, y: float) -> None:
    """What fp16 holds of the unscaled values, when they are multiplied by 2^shift first."""

    def x(exponent: int) -> float:
        return min(max(axes.x(exponent - shift), axes.x(axes.low - 1)), axes.x(_HIGHEST + 1))

    canvas.rect(
        x(_SMALLEST), y, x(_NORMAL) - x(_SMALLEST), 12, fill="--soft", radius=2,
        tip=f"{_power(_SMALLEST - shift)} to {_power(_NORMAL - shift)}, with fewer bits",
    )  # fmt: skip
    canvas.rect(
        x(_NORMAL), y, x(_LARGEST) - x(_NORMAL), 12, fill="--accent", radius=2,
        tip=f"{_power(_NORMAL - shift)} to {_power(_LARGEST - shift)}",
    )  # fmt: skip
    if x(_SMALLEST) - _LEFT > 130:
        canvas.text(x(_SMALLEST) - 8, y + 10.5, words, anchor="end", size=11.5, fill="--muted")
    else:
        canvas.text(x(_LARGEST) + 8, y + 10.5, words, size=11.5, fill="--muted")


def _legend(canvas: Canvas, *, scaled: bool) -> None:
    entries = [("--accent", "held by fp16"), ("--soft", "held with fewer bits")]
    entries += [("--c1", "saved by the loss scale")] if scaled else []
    entries += [("--bad", "lost or infinite"), ("--base", "zero in fp32 too")]
    x, y = _LEFT, canvas.height - 8
    for fill, words in entries:
        canvas.rect(x, y - 10, 14, 11, fill=fill, radius=2)
        canvas.text(x + 20, y, words, size=12, fill="--muted")
        x += 46 + 6.6 * len(words)


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
