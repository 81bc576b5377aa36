"""One HTML page of a search: the layouts, where time and memory go, the pipeline, and what would help. The
terminal shares its table of the fastest layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.errors import PenstockError
from penstock.planner.cost import run_words, step_words
from penstock.planner.explain import Lever, bends, why_others_lose
from penstock.planner.prediction import Prediction, room
from penstock.planner.search import Base, Layouts, explore
from penstock.planner.show import SHOWN, beside, memories, tiles, times
from penstock.report.figures import Line, lines
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.record import environment
from penstock.report.schedule_figure import schedule_figure
from penstock.report.units import GIB, duration

Sides = dict[str, tuple[Prediction, dict[str, float]]]
"""Layouts to compare, by name, with their `costs`."""
DRAWN_STAGES = 8
DRAWN_TURNS = 2
"""Maximum micro-batches per stage of the drawn pipeline; with more, the cells are too narrow to see."""


def plan_page(
    called: str, model: ModelConfig, machine: Machine, result: Layouts, levers: Sequence[Lever], base: Base,
    sides: Sides, uneven: Mapping[int, float],
) -> str:  # fmt: skip
    """The page as text. `called` is the model's name; `base` has the fixed settings, for searches on other numbers of
    devices; `sides` are the best layout and those to compare it with."""
    best, (_, run) = result[0], next(iter(sides.values()))
    reasons = why_others_lose(model, machine, result, best, uneven)
    sections = [
        layouts(model, result, SHOWN),
        times(result),
        memories(result, room(machine) if machine.memory_bytes else None),
        Section(title="Why the others are slower", rows=[("", [Cell(line, words=True)]) for line in reasons]),
        _devices(model, machine, best, base, uneven),
    ]  # fmt: skip
    if len(sides) > 1:
        sections.insert(1, beside(sides, vision=model.graph.vision))
    if best.plan.pp > 1:
        sections.append(_pipeline(best))
    if levers:
        rows = [
            ("", [Cell(lever.words, words=True), Cell(f"{lever.gain:+.1%}"), Cell(lever.plan.line(), words=True)])
            for lever in levers
        ]  # fmt: skip
        heads = [Cell("change", words=True), Cell("gain"), Cell("layout", words=True, rank=2)]
        text = "The best layout after a new search for each change, in samples per second."
        sections.append(Section(title="What would help most", text=text, columns=heads, rows=rows))
    sections.append(origin(environment(), title="Where this was computed"))
    rate, unit = rate_of(model, best)
    further = [
        (f"{best.hfu:.1%}", "HFU, with recomputation"), (f"{rate:,.0f}", f"{unit} per second and device"),
        *run_words(run),
    ]  # fmt: skip
    numbers = [*tiles(best), *(Tile(value=value, words=words) for value, words in further)]
    lead = (
        f"{best.parameters / 1e9:.3g} billion parameters, {best.global_batch} samples a step; {result.tried:,} layouts "
        f"tried, {result.too_large:,} do not fit. {step_words(run)}"
    )
    footer = (
        "Predicted by penstock plan. The accuracy of such predictions: docs/reference/planner-accuracy.md."
    )
    return page(f"{called} on {best.gpus} {machine.name}", lead, numbers, sections, footer)


def _devices(
    model: ModelConfig, machine: Machine, best: Prediction, base: Base, uneven: Mapping[int, float]
) -> Section:
    """Time by number of devices at the same global batch, without numbers that the fixed settings do not
    allow."""
    points: list[Prediction] = []
    for factor in (0.125, 0.25, 0.5, 1, 2, 4):
        devices = int(best.gpus * factor)
        if devices < 1 or devices != best.gpus * factor:
            continue
        try:
            result = explore(
                model, machine, devices, global_batch=best.global_batch, base=base.plan, fixed=base.fixed, keep=1,
                uneven=uneven,
            )  # fmt: skip
        except PenstockError:
            continue
        if result:
            points.append(result[0])
    measured = [(float(point.gpus), point.iteration_seconds) for point in points]
    fewest, slowest = measured[0]
    ideal = [(devices, slowest * fewest / devices) for devices, _ in measured]
    tips = [f"{p.gpus:,} devices: {duration(p.iteration_seconds, 3)}; {p.plan.line()}" for p in points]
    words = " ".join(bends([(point.gpus, point.global_batch, point.seconds) for point in points]))
    figure = partial(
        lines,
        [Line(label="best layout", points=measured, tips=tips, bold=True), Line(label="perfect scaling", points=ideal)],
        title="Seconds of one step by devices", x_label="devices", y_label="seconds per step", log=True,
        x_marks=[devices for devices, _ in measured],
    )  # fmt: skip
    text = f"The best layout of each number of devices, at the same global batch. {words}"
    return Section(title="More devices, or fewer", text=text, figures=[figure])


def _pipeline(best: Prediction) -> Section:
    """The schedule as it would run, with fewer micro-batches if there are many."""
    from penstock.schedules import Costs, generate, simulate

    plan = best.plan
    stages = min(plan.pp, DRAWN_STAGES)
    micro = plan.accumulate
    if micro > DRAWN_TURNS * stages or stages < plan.pp:
        micro = min(max(1, round(plan.accumulate / plan.pp)), DRAWN_TURNS) * stages
    name: Any = {"zero_bubble": "zb-h1"}.get(plan.schedule, plan.schedule)
    schedule = generate(name, stages, micro, plan.virtual if plan.virtual <= 4 else 2)
    chunks = schedule.stages // stages
    forward, backward, weight = (
        seconds / chunks * 1e3
        for seconds in (best.forward_seconds, best.backward_seconds, best.weight_gradient_seconds)
    )
    costs = Costs(forward=forward, backward_input=backward - weight, backward_weight=weight)
    figure = partial(schedule_figure, simulate(schedule, costs), title="The pipeline over time", unit="ms")
    bubble = f"a bubble of {best.bubble_fraction:.1%}"
    text = f"{plan.schedule}, {plan.pp} stages, {plan.accumulate} micro-batches: {bubble}."
    if (stages, micro, chunks) != (plan.pp, plan.accumulate, plan.virtual):
        text += (
            f" Drawn small, with {stages} stages of {plan.pp}, {micro} micro-batches of {plan.accumulate} and {chunks} "
            f"chunks of {plan.virtual}: the order is the same, but the drawing's bubble differs."
        )
    return Section(title="The pipeline", text=text, figures=[figure])


LEGEND = (
    "tp, pp, dp (cp, ep): devices that split a layer, pipeline stages, replicas (that split a sample, experts). "
    "micro: samples per pass × passes per step. virtual: chunks of blocks per stage. "
    "MFU, HFU: share of the peak that the model's FLOPs take, and with those computed again. "
    "GiB: on the fullest device. bubble: idle time over busy time."
)


_COLUMNS = {
    "": 0, "tp": 0, "pp": 0, "dp": 0, "micro": 0, "virtual": 5, "sharding": 1, "recompute": 2, "s/step": 0, "MFU": 3,
    "HFU": 3, "GiB": 0, "bubble": 6,
}  # fmt: skip
"""Columns of the table of layouts, and their ranks: see `Cell.rank`."""


def rate_of(model: ModelConfig, one: Prediction) -> tuple[float, str]:
    """The rate of one device per second: images of a vision model, tokens of a language model."""
    if model.graph.vision:
        return one.samples_per_second / one.gpus, "images"
    return one.tokens_per_second_per_gpu, "tokens"


def layouts(model: ModelConfig, result: Layouts, top: int) -> Section:
    """The `top` fastest layouts."""
    best = result[0]
    heads = [Cell(name, rank=rank) for name, rank in _COLUMNS.items()]
    heads.append(Cell(f"{rate_of(model, best)[1]}/s/GPU", rank=4))
    rows = []
    for rank, layout in enumerate(result[:top], 1):
        p = layout.plan
        extra = "".join(f" {name}{value}" for name, value in (("cp", p.cp), ("ep", p.ep)) if value > 1)
        cells = (
            str(rank), f"{p.tp}{extra}", str(p.pp), str(p.dp), f"{p.micro_batch}×{p.accumulate}", str(p.virtual),
            p.sharding if p.dp > 1 else "–", p.recompute, f"{layout.iteration_seconds:.4g}", f"{layout.mfu:.1%}",
            f"{layout.hfu:.1%}", f"{layout.memory_bytes / GIB:.1f}", f"{layout.bubble_fraction:.1%}",
            f"{rate_of(model, layout)[0]:,.0f}",
        )  # fmt: skip
        rows.append(("strong" if rank == 1 else "", [*map(Cell, cells)]))
    text = f"{LEGEND}\n\n{_error_words(result)}".strip()
    return Section(title="The fastest layouts", text=text, code=best.plan.line(), columns=heads, rows=rows)


def _error_words(result: Layouts) -> str:
    """How right the times are, and how many of the best layouts that leaves equal."""
    best = result[0]
    if best.interval is None:
        return ""
    error = best.interval.spread
    slowest = (1 + error) * best.iteration_seconds
    equal = sum(layout.iteration_seconds <= slowest for layout in result)
    words = f"The best takes {best.interval.seconds(best.iteration_seconds)}. "
    if equal == 1:
        return f"{words}No other layout is within {error:.1%} of it, the error between layouts of one model."
    return f"{words}{equal:,} layouts are equal: within {error:.1%}, the error between layouts of one model."
