"""The table of the fastest layouts, which terminal and page share, and how sure it is."""

from __future__ import annotations

from penstock.cli.plan_config import PlanConfig
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.rules import problems
from penstock.planner.cost import RunTerms, costs
from penstock.planner.prediction import Prediction
from penstock.planner.search import SearchResult
from penstock.report.page import Cell, Section
from penstock.report.units import GIB

LEGEND = (
    "tp, pp, dp (cp, ep): devices that split a layer, pipeline stages, replicas (that split a sample, experts). "
    "micro: samples per pass × passes per step. virtual: chunks of blocks per stage. "
    "MFU, HFU: share of the peak that the model's FLOPs take, and with those computed again. "
    "GiB: on the fullest device. bubble: idle time over busy time."
)


def best_runnable(result: SearchResult, model: ModelConfig, machine: Machine) -> Prediction | None:
    """The fastest layout that can be trained today."""
    runs = (one for one in result.predictions if not problems(one.plan, model, machine, run=True))
    return next(runs, None)


def costs_of(
    config: PlanConfig, one: Prediction, machine: Machine, price: float | None = None
) -> dict[str, float]:
    """`costs` of a layout, by the length and the prices that the settings name; `price` replaces that of an hour."""
    price = config.price if price is None else price
    terms = RunTerms(samples=config.samples(), price=price, grams_per_kwh=config.grams_per_kwh)
    return costs(one, machine, terms)


def rate_of(model: ModelConfig, one: Prediction) -> tuple[float, str]:
    """The rate of one device per second: images of a vision model, tokens of a language model."""
    if model.graph.vision:
        return one.samples_per_second / one.gpus, "images"
    return one.tokens_per_second_per_gpu, "tokens"


def layouts(model: ModelConfig, result: SearchResult, top: int) -> Section:
    """The `top` fastest layouts."""
    heads = [*map(Cell, ("", "tp", "pp", "dp", "micro")), Cell("virtual", rank=5), Cell("sharding", rank=1)]
    heads += [Cell("recompute", rank=2), Cell("s/step"), Cell("MFU", rank=3), Cell("HFU", rank=3)]
    heads += [
        Cell("GiB"), Cell("bubble", rank=6), Cell(f"{rate_of(model, result.predictions[0])[1]}/s/GPU", rank=4),
    ]  # fmt: skip
    rows = [
        ("strong" if rank == 1 else "", [Cell(str(rank)), *map(Cell, _row(model, one))])
        for rank, one in enumerate(result.predictions[:top], 1)
    ]
    return Section(
        title="The fastest layouts", text=f"{LEGEND}\n\n{_error_words(result)}".strip(),
        code=result.predictions[0].plan.line(), columns=heads, rows=rows,
    )  # fmt: skip


def _row(model: ModelConfig, one: Prediction) -> list[str]:
    p = one.plan
    extra = "".join(f" {name}{value}" for name, value in (("cp", p.cp), ("ep", p.ep)) if value > 1)
    return [
        f"{p.tp}{extra}", str(p.pp), str(p.dp), f"{p.micro_batch}×{p.accumulate}", str(p.virtual),
        p.sharding if p.dp > 1 else "–", p.recompute, f"{one.iteration_seconds:.4g}", f"{one.mfu:.1%}",
        f"{one.hfu:.1%}", f"{one.memory_bytes / GIB:.1f}",
        f"{one.bubble_fraction:.1%}", f"{rate_of(model, one)[0]:,.0f}",
    ]  # fmt: skip


def _error_words(result: SearchResult) -> str:
    """How right the times are, and how many of the best layouts that leaves equal."""
    best = result.predictions[0]
    if best.interval is None:
        return ""
    error = best.interval.spread
    equal = sum(one.iteration_seconds <= (1 + error) * best.iteration_seconds for one in result.predictions)
    words = f"The best takes {best.interval.seconds(best.iteration_seconds)}. "
    if equal == 1:
        return f"{words}No other layout is within {error:.1%} of it, the error between layouts of one model."
    return f"{words}{equal:,} layouts are equal: within {error:.1%}, the error between layouts of one model."
