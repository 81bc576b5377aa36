"""A climb as one self-contained HTML page, as a cell of a notebook, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.ladder.result import LadderReport, RungResult
from penstock.ladder.tables import (
    LOOKS,
    MIB,
    beyond_words,
    equality_words,
    figures,
    file_name,
    flop_unit,
    heading,
    in_plans,
    mebibytes,
    noise_words,
    plain,
    plan_words,
    ratio,
    seconds,
    stays,
    times,
)
from penstock.report.chart import number, signed
from penstock.report.figures import Bar, Line, State, difference_bars, lines, memory_bars, waterfall
from penstock.report.page import Cell, Section, Tile, cell, origin, page
from penstock.report.units import rounded

SAME_LOSS = 1e-3
"""Curves that differ nowhere by more than this are drawn as one."""

_STATES: Mapping[str, State] = {
    "baseline": "baseline", "kept": "kept", "unproven": "unproven", "not kept": "not kept", "reported": "not kept",
    "offered": "offered",
}  # fmt: skip
TRIED = 24
"""Number of fastest settings of the search that the page lists; ladder.json has all."""
_SPEED = "speed relative to the baseline"


def to_html(report: LadderReport) -> str:
    """The whole report as one page that loads nothing from outside."""
    sections = [
        *_plans(report),
        *_gains(report, _gain_words(report)),
        *_search(report),
        *_memory(report),
        *_losses(report),
        *_several(report),
        *_absent(report),
        Section(
            title="What each rung does", facts={rung.title: rung.why for rung in report.rungs}, folded=True
        ),
        origin(report.environment, command=report.command, more=_facts(report)),
    ]
    data = f"{file_name(report)}.json"
    footer = f"Made by Penstock in {report.wall_seconds:.0f} s. The figures are in {data} beside this page."
    return page(heading(report), _lead(report), _tiles(report), sections, footer)


@cell.register
def notebook(report: LadderReport) -> str:
    """The Plans, the figure and the table, as HTML for a notebook's cell."""
    sections = [*_plans(report), *_gains(report)]
    return page(heading(report), _lead(report), _tiles(report), sections, whole=False)


def _gains(report: LadderReport, text: str = "") -> list[Section]:
    """The figure and the table of the measured rungs."""
    drawn = Section(title="What each optimisation gains", text=text, figures=[partial(speeds, report)])
    return [drawn, figures(report, [rung for rung in report.rungs if rung.measured])]


def picture(report: LadderReport) -> str:
    """The rungs that pay, as a standalone SVG file for a README or a slide."""
    text = f"{report.title}: {report.speedup:.2f}× the speed with the same results"
    if not report.same_results.rungs:
        text = f"{report.title}: {beyond_words(report.nearest)} on this machine"
    if report.fastest is not None:
        text += f", {report.fastest.speedup.value:.2f}× with others"
    paying = [rung for rung in report.rungs if in_plans(rung)]
    return speeds(report, rungs=paying, heading=text, x_label=f"{_SPEED}; {_where(report)}", alone=True)


def _where(report: LadderReport) -> str:
    """The device, and the batch if it is the ladder's."""
    machine = report.environment.get("machine", {})
    gpus: Sequence[str] = machine.get("gpus") or ()
    device = f"{machine.get('cores')} cores of {machine.get('processor')}"
    if report.machine.get("device") == "cuda" and gpus:
        device = gpus[0].split(",")[0]
    return device if report.batch is None else f"{device}, batch {report.batch}"


def _lead(report: LadderReport) -> str:
    tried = sum(rung.measured for rung in report.rungs) - 1
    paid = sum(rung.status == "kept" for rung in report.rungs)
    built = f"{len(report.tried)} of {report.candidates:,} combinations built, "
    searched = built if report.candidates else ""
    paying = f"{paid} of them pay and leave results as they are"
    if not tried:
        paying = f"so {stays(report)}"
    elif not paid and report.same_results.rungs:
        count = len(report.same_results.rungs)
        paying = f"none pays beyond the noise by itself, but the {count} of the Plan together do"
    return f"Training on {_where(report)}: {searched}{tried} optimisations measured, {paying}."


def _tiles(report: LadderReport) -> list[Tile]:
    """The most important numbers, all from the same estimate."""
    best, first, same = report.best, report.baseline, report.same_results
    words = f"the speed of {plain(report)}, same results"
    if not same.rungs:
        words = f"{plain(report)}: {beyond_words(report.nearest)}"
    tiles = [Tile(value=times(same.speedup) if same.rungs else "1.00×", words=words, lead=True)]
    if report.fastest is not None:
        tiles.append(Tile(value=times(report.fastest.speedup), words="with what changes results"))
    if first.samples_per_second and same.samples_per_second:
        now, before = (number(speed.value) for speed in (same.samples_per_second, first.samples_per_second))
        tiles.append(Tile(value=f"{now}/s", words=f"{report.unit}, from {before}"))
    if best.model_flops_per_second and first.model_flops_per_second:
        scale, unit = flop_unit(report)
        rates = best.model_flops_per_second, first.model_flops_per_second
        now, before = (number(rate.value / scale) for rate in rates)
        tiles.append(Tile(value=now, words=f"{unit} of the model, from {before}"))
    if same.memory_bytes and first.memory_bytes:
        words = f"peak memory, from {number(first.memory_bytes / MIB)}"
        tiles.append(Tile(value=f"{number(same.memory_bytes / MIB)} MiB", words=words))
    if same.loss_difference is not None and report.noise is not None:
        words = f"loss difference; seeds alone make ±{report.noise.deviation:.3f}"
        tiles.append(Tile(value=signed(same.loss_difference, 3), words=words))
    return tiles


def _plans(report: LadderReport) -> list[Section]:
    """The Plan with the same results, and the fastest of all if it is another."""
    words, notes = plan_words(report, report.same_results), " ".join(report.notes)
    title = "The fastest Plan with the same results"
    sections = [Section(title=title, text=words, warning=notes, code=report.train_command)]
    if report.fastest is not None:
        words = f"It changes results, so decide for yourself. {plan_words(report, report.fastest)}"
        code = report.fastest.train_command
        sections.append(Section(title="The fastest of all", text=words, code=code))
    return sections


def _gain_words(report: LadderReport) -> str:
    text = (
        "From the baseline upwards, each rung of the Plan is added to those before it, so that their gains multiply to "
        "the total. Green gains are beyond the noise; the interval of an unproven rung includes 1. Below are the rungs "
        "measured on top of the best Plan: those that pay but change results, and those that do not pay. All speeds "
        "come from one joint estimate over rounds in which the settings take turns, so a machine that slows down "
        "affects all of them; whiskers are confidence intervals."
    )
    return f"{text}\n\n{noise_words(report)}".strip()


def speeds(
    report: LadderReport, *, rungs: Sequence[RungResult] | None = None, x_label: str = _SPEED, **look: Any
) -> str:  # fmt: skip
    """The path as a waterfall, and below it the speeds of rungs that are not on it. Rungs that enlarge the samples
    themselves are left out, because their speeds are not comparable."""
    bars, level = [], 1.0
    for rung in rungs or _speedy(report):
        ratio, forecast = rung.to_baseline, rung.forecast
        if ratio is None:
            continue
        predicted = forecast.to_baseline if forecast and rung.status != "baseline" else None
        bar = Bar(
            label=rung.title, state=_STATES[rung.status], value=ratio.value, low=ratio.low, high=ratio.high,
            floor=level, predicted=predicted,
        )  # fmt: skip
        bars.append(bar)
        level = ratio.value if rung.name in report.same_results.rungs else level
    return waterfall(bars, title="Speed of each rung relative to the baseline", x_label=x_label, **look)


def _speedy(report: LadderReport) -> list[RungResult]:
    """Measured rungs that are compared by speed: kept ones first, then offered ones, then the rest."""
    measured = [rung for rung in report.rungs if rung.measured and rung.compared_by == "samples"]
    path = ("baseline", *report.same_results.rungs)
    return sorted(measured, key=lambda rung: 0 if rung.name in path else 1 if in_plans(rung) else 2)


def _search(report: LadderReport) -> list[Section]:
    """The section on the whole settings that the search measured."""
    if not report.tried:
        return []
    columns = [
        Cell("Plan", words=True), Cell("measured", "to baseline"), Cell("predicted"),
        Cell("corrected", "by those before", rank=2), Cell("build s", rank=2), Cell("compile s", rank=3),
    ]  # fmt: skip
    rows = []
    for tried in report.tried[:TRIED]:
        changed = ", ".join(f"{name} {value}" for name, value in tried.model.items())
        cells = [
            Cell(tried.plan, changed, words=True), ratio(tried.to_baseline), Cell(f"{tried.predicted:.2f}×"),
            Cell(f"{tried.corrected:.2f}×"), Cell(f"{tried.build_seconds:.1f}"), Cell(seconds(tried.compile_seconds)),
        ]  # fmt: skip
        rows.append(("strong" if tried.plan == report.plan else "", cells))
    text = (
        f"The planner ranked {report.candidates:,} combinations that keep results; each measurement corrected its "
        "forecasts of the others. The fastest raced, and the slower half was dropped repeatedly."
    )
    return [Section(title="What the search tried", text=text, columns=columns, rows=rows)]


def _memory(report: LadderReport) -> list[Section]:
    bars = []
    for rung in report.rungs:
        if rung.measured and rung.memory_bytes is not None:
            forecast = rung.forecast.memory_bytes if rung.forecast else None
            mib, predicted = rung.memory_bytes / MIB, forecast / MIB if forecast else None
            bars.append(Bar(label=rung.title, state=_STATES[rung.status], value=mib, predicted=predicted))
    text = (
        "The most memory that tensors take at any moment of a step: weights, gradients, optimizer state, activations. "
        "Diamonds are the planner's predictions."
    )
    drawn = partial(memory_bars, bars, title="Peak memory of each rung", x_label="peak memory, MiB")
    return [Section(title="Memory", text=text, figures=[drawn])] if bars else []


def _losses(report: LadderReport) -> list[Section]:
    noise = report.noise
    if noise is None:
        return []
    steps = list(enumerate(zip(*noise.curves, strict=True), 1))
    band = ([(step, min(losses)) for step, losses in steps], [(step, max(losses)) for step, losses in steps])
    steps_from = (
        f"{report.loss_steps} optimizer steps on real data, from the same weights, with samples in the same order. "
        if report.script is None
        else "The first steps of the script, as far as they were timed. "
    )
    text = (
        f"{steps_from}"
        f"The grey band is the baseline under {len(noise.seeds)} seeds, which change weights and samples. A rung's "
        f"difference compares mean losses over the last quarter of the steps. One standard deviation of the baseline "
        f"over its seeds is {noise.deviation:.4f}, estimated from only {len(noise.seeds)} runs. Curves within "
        f"{SAME_LOSS:g} of each other are drawn as one. A rung with a larger batch or image trains on other samples, "
        f"so its difference is not an error of arithmetic."
    )
    drawn: list[Callable[..., str]] = [
        partial(
            lines, _curves(report), band=band, band_label=f"baseline, {len(noise.seeds)} seeds",
            title="Loss of each rung", x_label="optimizer step", y_label="loss",
        )
    ]  # fmt: skip
    bars = []
    for rung in report.rungs[1:]:
        if rung.losses and (change := rung.loss_difference) is not None and math.isfinite(change):
            explained = abs(change) <= 2 * noise.deviation
            state: State = "kept" if explained else "higher" if change > 0 else "lower"
            bars.append(Bar(label=rung.title, state=state, value=change))
    if bars:
        title, label = "Loss difference of each rung", "loss less the baseline's"
        drawn.append(partial(difference_bars, bars, noise=noise.deviation, title=title, x_label=label))
    return [Section(title="What it does to the loss", text=text, figures=drawn)]


def _curves(report: LadderReport) -> list[Line]:
    """A loss curve for each rung; nearly equal curves share a line and its label."""
    groups: list[list[RungResult]] = []
    for rung in report.rungs:
        if not rung.losses:
            continue
        for group in groups:
            # The settings of a script are timed for different numbers of steps.
            differences = (abs(a - b) for a, b in zip(group[0].losses, rung.losses, strict=False))
            if all(difference <= SAME_LOSS for difference in differences):
                group.append(rung)
                break
        else:
            groups.append([rung])
    drawn = []
    for group in groups:
        label, points = ", ".join(rung.title for rung in group), list(enumerate(group[0].losses, 1))
        drawn.append(Line(label=label, points=points, bold=group[0].status == "baseline"))
    return drawn


def _several(report: LadderReport) -> list[Section]:
    """The section on rungs with several processes."""
    rungs = [rung for rung in report.rungs if rung.memory_by_rank]
    if not rungs:
        return []
    text = (
        f"{report.procs} processes on this machine, each with the micro-batch of a single process, so that the global "
        f"batch is {report.procs} times as large. Speeds are totals, memory is per process. A single process then "
        f"takes the same samples from the same weights, one micro-batch after the other, to check the results."
    )
    heads = Cell("rung", words=True), Cell("MiB per process", "predicted")
    columns = [*heads, Cell("against one process", words=True)]
    rows = []
    for rung in rungs:
        forecast = rung.forecast
        equal = (
            equality_words(rung.equality) if rung.equality else "not checked: it builds on a rung that was"
        )
        each = " · ".join(map(mebibytes, rung.memory_by_rank))
        memory = Cell(each, mebibytes(forecast.memory_bytes if forecast else None))
        cells = [Cell(rung.title, rung.plan, words=True), memory, Cell(equal, words=True)]
        rows.append((LOOKS.get(rung.status, "faint"), cells))
    return [Section(title="Several processes", text=text, columns=columns, rows=rows)]


def _absent(report: LadderReport) -> list[Section]:
    """The section on rungs without a measurement, with the reasons."""
    reasons = {rung.title: f"{rung.status}: {rung.reason}" for rung in report.rungs if not rung.measured}
    return [Section(title="What was not measured", facts=reasons, folded=True)] if reasons else []


def _facts(report: LadderReport) -> dict[str, str]:
    machine = report.machine
    rates = machine.get("peak_flops", {}).items()
    peaks = ", ".join(f"{name} {rounded(rate / 1e12, 3)}" for name, rate in rates)
    memory = machine.get("memory_bytes_per_second", 0) / 1e9
    name = f"with Machine {machine.get('name')} ({machine.get('source')})"
    words = f"{name}: peak {peaks} TFLOP/s; memory {memory:.0f} GB/s"
    return {"predictions": words}
