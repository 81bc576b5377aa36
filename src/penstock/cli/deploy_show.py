"""The answer of `penstock deploy` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from penstock.cli._display import Part
from penstock.config.formats import LOSSY
from penstock.config.machine import Machine
from penstock.report.page import Cell, Section
from penstock.report.units import GIB, money
from penstock.serve.deploy import Layout, Ranking
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival

LEGEND = (
    "tp, pp: devices that split a layer, pipeline stages. slots: sequences that a replica generates at a time. First "
    "token, a token, request: time to the first token, between tokens, and in all; median / 95th percentile. "
    f"{', '.join(LOSSY)} change results: --types {','.join(LOSSY)} allows them."
)

STEPS = {
    "device": "Predicted for a server that records its steps, as vLLM does, so that only the device's work takes time.",
    "launched": "The choice is predicted for penstock.sh, where Python launches the operators one by one.",
    "recorded": "The choice is predicted for penstock.sh, which records its steps (--compile whole --cache slots).",
}


def parts_of(
    config: DeployConfig, machine: Machine, arrivals: Sequence[Arrival], result: Ranking
) -> Iterator[Part]:
    """The table of layouts, the choice in a sentence, and why the others lose."""
    span = arrivals[-1].at
    rate = f", {len(arrivals) / span:.3g} a second" if span else ""
    yield f"{config.called} on {machine.name}: {len(arrivals):,} requests{rate}, simulated."
    yield _table(config, result)
    if machine.device != "cpu":
        yield Text(STEPS[result.layouts[0].steps], style="dim")
    assumptions = dict.fromkeys(layout.assumption for layout in result.layouts[: config.top])
    yield from (f"note: {words}" for words in assumptions if words)
    if (best := result.choice) is None:
        yield f"No layout on {config.gpus} {machine.name} is in time. The nearest: {result.layouts[0].words()}."
        yield "Allow more devices with --gpus, more time with --p95-latency, or smaller types with --types."
        return
    assert best.served is not None
    rate, cost = f"{best.served.tokens_per_second:,.0f} tokens a second", _cost(best, config.price)
    yield f"choice: {best.words()}: {best.gpus} {machine.name}, {rate}, {cost} per million tokens."
    if config.loads is not None:
        uneven = f"the busiest device of a replica has {best.uneven:.2f} times the mean"
        yield f"experts: by {config.loads}, {uneven}."


def _table(config: DeployConfig, result: Ranking) -> Section:
    """Layouts, the choice first."""
    names = "type", "tp", "pp", "replicas", "GPUs", "slots", "first token", "a token", "request", "tokens/s"
    heads = [*map(Cell, names), Cell("GiB", rank=1), Cell("per million", rank=2), Cell("why not", words=True)]
    rows = []
    for layout in result.layouts[: config.top]:
        look = "strong" if layout is result.choice else ""
        rows.append((look, [*map(Cell, _row(layout, config.price)), Cell(layout.why, words=True)]))
    return Section(title="Layouts", text=LEGEND, columns=heads, rows=rows)


def _row(layout: Layout, price: float | None) -> list[str]:
    first = [layout.type, str(layout.tp), str(layout.pp), str(layout.replicas), str(layout.gpus)]
    memory, served = f"{layout.memory_bytes / GIB:.1f}", layout.served
    if served is None:
        return [*first, "–", "–", "–", "–", "–", memory, "–"]
    spreads = served.first_token, served.per_token, served.latency
    times = [f"{_time(spread.p50)} / {_time(spread.p95)}" for spread in spreads]
    rate, cost = f"{served.tokens_per_second:,.0f}", _cost(layout, price)
    return [*first, str(layout.slots), *times, rate, memory, cost]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _cost(layout: Layout, price: float | None) -> str:
    return f"{layout.device_hours:.3g} h" if price is None else money(layout.device_hours * price)
