"""What `penstock scale` found, as text and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.report.page import Cell, Section, Tile, page
from penstock.report.precision_figures import Shares, gradient_figure, percent
from penstock.report.record import facts

if TYPE_CHECKING:
    from penstock.cli.scale import Measured
    from penstock.precision import GradientHistogram, Recommendation
    from penstock.precision.histogram import Histogram

SOURCE = 'Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2'


def heading(measured: Measured, found: GradientHistogram) -> str:
    """What was measured, in a line."""
    each = f" of {measured.samples}" if measured.samples else ""
    trained = (
        f", training at a rate of {measured.lr:g} in between" if measured.lr else ", at the same weights"
    )
    return f"{measured.title} on {measured.data}: {found.batches} batches{each}{trained}"


def rows(found: GradientHistogram, advice: Recommendation) -> list[tuple[str, list[str]]]:
    """What fp16 makes of activations' gradients, weights' and all, without the scale and with it."""
    kinds = (found.activations, found.weights, found.all)

    def row(words: str, value: Any) -> tuple[str, list[str]]:
        return words, [value(kind) for kind in kinds]

    def pair(shares: Any) -> Any:
        return lambda kind: f"{percent(shares(kind, 1.0))} → {percent(shares(kind, advice.scale))}"

    return [
        row("values", lambda kind: f"{kind.values:,}"),
        row("zero in fp32 too", lambda kind: percent(kind.zeros / max(kind.values, 1))),
        row("lost: become zero", pair(lambda kind, at: kind.lost(at))),
        row("held with fewer bits", pair(lambda kind, at: kind.denormal(at))),
        row("become infinite", pair(lambda kind, at: kind.infinite(at))),
        row("largest", lambda kind: f"{kind.largest:.3g} → {kind.largest * advice.scale:,.0f}"),
    ]


def table(measured: Measured, found: GradientHistogram, advice: Recommendation) -> str:
    """For a terminal."""
    lines = [["in fp16, without → with the scale", "activations", "weights", "all"]]
    lines += [[words, *values] for words, values in rows(found, advice)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(line[1:], widths[1:]))])
        for line in lines
    )
    return f"{heading(measured, found)}\n\n{text}"


def scale_page(
    measured: Measured, found: GradientHistogram, advice: Recommendation, environment: Mapping[str, Any]
) -> tuple[str, str]:
    """The page, and the figure of activation gradients as a file of its own."""

    def figure(histogram: Histogram, kind: str, alone: bool = False) -> str:
        title = f"Gradients of {kind} of {measured.title}"
        return gradient_figure(_shares(histogram), scale=advice.scale, title=title, alone=alone)

    words = (
        "Each bar is the share of values between two powers of two; the axis is logarithmic. The bands below say what "
        "fp16 holds of them as they are, and when the loss is multiplied by the scale before the backward pass. After "
        f"{SOURCE}, figure 3."
    )
    html = page(
        f"The loss scale of {measured.title}",
        heading(measured, found),
        _tiles(advice),
        [
            Section(title="Use it", text=_use(advice), code=measured.line),
            Section(
                title="Gradients of activations",
                text=words,
                figures=[figure(found.activations, "activations")],
            ),
            Section(title="Gradients of weights", figures=[figure(found.weights, "weights")]),
            Section(
                title="The figures",
                text="Shares of all values: in fp16 without the loss scale → with it.",
                columns=[Cell("", words=True), Cell("activations"), Cell("weights"), Cell("all")],
                rows=[
                    ("", [Cell(words, words=True), *map(Cell, values)])
                    for words, values in rows(found, advice)
                ],
            ),
            Section(
                title="Where this was measured",
                facts=facts(environment),
                code=str(environment.get("command") or ""),
            ),
        ],
        "Made by penstock scale. The counts are in scale.json beside this page.",
    )
    return html, figure(found.activations, "activations", alone=True)


def _tiles(advice: Recommendation) -> list[Tile]:
    return [
        Tile(value=f"{advice.scale:,g}", words="the recommended constant loss scale", lead=True),
        Tile(value=percent(advice.saved), words="of all gradients saved from becoming zero"),
        Tile(value=percent(advice.lost), words=f"lost still, from {percent(advice.lost_before)} without it"),
        Tile(value=f"{advice.largest:.3g}", words=f"the largest; a factor of {advice.headroom:g} is left"),
    ]


def _use(advice: Recommendation) -> str:
    return (
        f"The largest power of two S for which the largest gradient, {advice.headroom:g} times as large and multiplied "
        f"by S, stays below 65,504. Steps that overflow nevertheless are skipped. A dynamic scale, the default, finds "
        f"the same by itself, at the price of skipped steps now and then."
    )


def _shares(histogram: Histogram) -> Shares:
    from penstock.precision.histogram import HIGH, LOW

    values = max(histogram.values, 1)
    bins = {exponent: histogram.between(exponent, exponent + 1) for exponent in range(LOW, HIGH + 1)}
    return Shares(bins=bins, zero=histogram.zeros / values, wrong=histogram.wrong / values)
