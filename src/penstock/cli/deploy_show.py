"""The answer of `penstock deploy` on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from penstock.config.machine import Machine
from penstock.config.model import title
from penstock.report.page import Cell, Section, plain_console, terminal_table
from penstock.report.units import money
from penstock.serve.deploy import Found, Layout
from penstock.serve.measure import Measured
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival, Served

GIB = 2**30
LEGEND = (
    "tp, pp: devices that split a layer, pipeline stages. slots: sequences at a time of a replica. First token, "
    "between tokens, whole request: half of all requests / 95 % of them. int8, fp8 and int4 change "
    "results: --types int8,fp8,int4 allows them."
)


def show(
    asked: DeployConfig, machine: Machine, arrivals: Sequence[Arrival], found: Found, files: Sequence[str]
) -> None:
    """The table of layouts, the choice in a sentence, and why the others lose."""
    assert asked.model is not None
    console = plain_console()
    span = arrivals[-1].at
    rate = f", {len(arrivals) / span:.3g} a second" if span else ""
    console.print(f"{title(asked.model)} on {machine.name}: {len(arrivals):,} requests{rate}, simulated.")
    console.print(terminal_table(table(asked, found), console.width))
    console.print(LEGEND, style="dim", soft_wrap=not sys.stdout.isatty())
    best = found.choice
    if best is None:
        console.print(
            f"No layout on {asked.gpus} {machine.name} is in time. The nearest: {found.layouts[0].words()}."
        )
        console.print(
            "Allow more devices with --gpus, more time with --p95-latency, or smaller types with --types."
        )
        return
    assert best.served is not None
    console.print(
        f"choice: {best.words()}: {best.gpus} {machine.name}, {best.served.tokens_per_second:,.0f} tokens a second, "
        f"{_cost(best, asked.price)} per million tokens.",
        soft_wrap=True,
    )
    if asked.loads is not None:
        console.print(
            f"experts: by {asked.loads}, the busiest device of a replica has {best.uneven:.2f} times the mean.",
            soft_wrap=True,
        )
    for name in files:
        console.print(f"written: {asked.output}/{name}", soft_wrap=True)


def show_measured(predicted: Served, both: Measured) -> None:
    """Show side by side the machine's prediction, the simulation from the server's own steps, and the measurement."""
    columns = (predicted, both.simulated, both.measured)
    kinds: dict[str, Callable[[Served], str]] = {
        "tokens a second": lambda one: f"{one.tokens_per_second:,.1f}",
        "first token, half of all": lambda one: _time(one.first_token.p50),
        "first token, 95 %": lambda one: _time(one.first_token.p95),
        "a token, half of all": lambda one: _time(one.per_token.p50),
        "request, half of all": lambda one: _time(one.latency.p50),
        "request, 95 %": lambda one: _time(one.latency.p95),
        "refused": lambda one: f"{one.refused:,}",
    }
    rows = [("", [Cell(name, words=True), *(Cell(of(one)) for one in columns)]) for name, of in kinds.items()]
    heads = [Cell("", words=True), Cell("from the machine"), Cell("from its steps"), Cell("measured")]
    console = plain_console()
    console.print(terminal_table(Section(title="Measured", columns=heads, rows=rows), console.width))


def table(asked: DeployConfig, found: Found) -> Section:
    """Layouts, the choice first."""
    heads = [
        *map(Cell, ("type", "tp", "pp", "replicas", "GPUs", "slots", "first token", "a token", "request"))
    ]
    heads += [Cell("tokens/s"), Cell("GiB", rank=1), Cell("per million", rank=2), Cell("why not", words=True)]
    rows = [
        (
            "strong" if one is found.choice else "",
            [*map(Cell, _row(one, asked.price)), Cell(one.why, words=True)],
        )
        for one in found.layouts[: asked.top]
    ]
    return Section(title="Layouts", columns=heads, rows=rows)


def _row(one: Layout, price: float | None) -> list[str]:
    first = [one.type, str(one.tp), str(one.pp), str(one.replicas), str(one.gpus)]
    if one.served is None:
        return [*first, "–", "–", "–", "–", "–", f"{one.memory_bytes / GIB:.1f}", "–"]
    s = one.served
    times = [
        f"{_time(spread.p50)} / {_time(spread.p95)}" for spread in (s.first_token, s.per_token, s.latency)
    ]
    return [
        *first, str(one.slots), *times, f"{s.tokens_per_second:,.0f}", f"{one.memory_bytes / GIB:.1f}",
        _cost(one, price),
    ]  # fmt: skip


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _cost(one: Layout, price: float | None) -> str:
    return f"{one.device_hours:.3g} h" if price is None else money(one.device_hours * price)
