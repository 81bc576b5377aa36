"""The result of `penstock scale`, as text and as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from penstock.precision import GradientHistogram, Recommendation
from penstock.precision.histogram import Histogram
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.precision_figures import gradient_figure, percent

SOURCE = 'Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2'


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMeasurement:
    """A measurement, and the advice that follows from it."""

    title: str
    data: str
    samples: int | None
    """Per batch; None where a factory's batch does not say."""
    lr: float
    gradients: GradientHistogram
    advice: Recommendation

    @property
    def line(self) -> str:
        """The call that trains with the recommended scale."""
        return (
            'model, optimizer = penstock.accelerate(model, optimizer, precision="O1", dtype="fp16", '
            f"loss_scale={self.advice.scale!r})"
        )

    @property
    def heading(self) -> str:
        """The measurement in one line."""
        per_batch = f" of {self.samples}" if self.samples else ""
        trained = f", training at a rate of {self.lr:g} in between" if self.lr else ", at the same weights"
        return f"{self.title} on {self.data}: {self.gradients.batches} batches{per_batch}{trained}"

    @property
    def table(self) -> Section:
        """The effect of fp16 on gradients of activations, of weights and of all, without the scale and with it."""
        kinds = (self.gradients.activations, self.gradients.weights, self.gradients.all)
        scale = self.advice.scale

        def row(words: str, value: Callable[[Histogram], str]) -> tuple[str, list[Cell]]:
            return "", [Cell(words, words=True), *(Cell(value(kind)) for kind in kinds)]

        def pair(share: Callable[[Histogram, float], float]) -> Callable[[Histogram], str]:
            return lambda kind: f"{percent(share(kind, 1.0))} → {percent(share(kind, scale))}"

        return Section(
            title="The figures",
            text="Shares of all values: in fp16 without the loss scale → with it.",
            columns=[
                Cell("in fp16, without → with the scale", words=True), Cell("activations"), Cell("weights"),
                Cell("all", rank=2),
            ],
            rows=[
                row("values", lambda kind: f"{kind.values:,}"),
                row("zero in fp32 too", lambda kind: percent(kind.zeros / max(kind.values, 1))),
                row("lost: become zero", pair(Histogram.lost)),
                row("held with fewer bits", pair(Histogram.denormal)),
                row("become infinite", pair(Histogram.infinite)),
                row("largest", lambda kind: f"{kind.largest:.3g} → {kind.largest * scale:,.0f}"),
            ],
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The content of scale.json."""
        return {
            "model": self.title, "data": self.data, "samples": self.samples, "lr": self.lr,
            "recommendation": asdict(self.advice) | {"saved": self.advice.saved}, "line": self.line,
            "gradients": self.gradients.to_dict(),
        }  # fmt: skip


def scale_page(measured: ScaleMeasurement, environment: Mapping[str, Any]) -> tuple[str, str]:
    """The page, and the figure of activation gradients as a file of its own."""
    advice, gradients = measured.advice, measured.gradients

    def figure(histogram: Histogram, kind: str) -> Callable[..., str]:
        title = f"Gradients of {kind} of {measured.title}"
        return partial(gradient_figure, histogram, scale=advice.scale, title=title)

    use = (
        f"The largest power of two S for which the largest gradient, {advice.headroom:g} times as large and multiplied "
        "by S, stays below 65,504. Steps that overflow nevertheless are skipped. A dynamic scale, the default, finds "
        "the same by itself, at the price of skipped steps now and then."
    )
    bars = (
        "Each bar is the share of values between two powers of two; the axis is logarithmic. The bands below say what "
        "fp16 holds of them as they are, and when the loss is multiplied by the scale before the backward pass. After "
        f"{SOURCE}, figure 3."
    )
    tiles = [
        Tile(value=f"{advice.scale:,g}", words="the recommended constant loss scale", lead=True),
        Tile(value=percent(advice.saved), words="of all gradients saved from becoming zero"),
        Tile(value=percent(advice.lost), words=f"lost still, from {percent(advice.lost_before)} without it"),
        Tile(value=f"{advice.largest:.3g}", words=f"the largest; a factor of {advice.headroom:g} is left"),
    ]
    activations = figure(gradients.activations, "activations")
    sections = [
        Section(title="Use it", text=use, code=measured.line),
        Section(title="Gradients of activations", text=bars, figures=[activations]),
        Section(title="Gradients of weights", figures=[figure(gradients.weights, "weights")]),
        measured.table,
        origin(environment),
    ]
    footer = "Made by penstock scale. The counts are in scale.json beside this page."
    html = page(f"The loss scale of {measured.title}", measured.heading, tiles, sections, footer)
    return html, activations(alone=True)
