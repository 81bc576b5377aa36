"""A climb as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.ladder.result import Equality, LadderReport, RungResult
from penstock.report.chart import number, signed
from penstock.report.figures import Bar, Line, State, difference_bars, lines, memory_bars, waterfall
from penstock.report.page import Cell, Section, Tile, page
from penstock.report.record import facts

MIB = 2.0**20
SAME_LOSS = 1e-3
"""Curves that are nowhere further apart than this are drawn as one."""

_STATES: Mapping[str, State] = {
    "baseline": "baseline", "kept": "kept", "not kept": "not kept", "offered": "not kept", "reported": "not kept",
}  # fmt: skip
_LOOKS: Mapping[str, str] = {"baseline": "", "kept": "strong"}
"""How a rung's row looks; others are faint."""
_MEMORY_WORDS = (
    "The most memory that tensors take at any moment of a step: weights, gradients, optimizer state, activations. "
    "Diamonds are the planner's predictions."
)


def to_html(report: LadderReport) -> str:
    """The whole report as one page: no script, no outside request."""
    sections = [
        Section(title="The best Plan", text=_plan_words(report), code=report.train_command),
        Section(title="What each optimisation gains", text=_gain_words(report), figures=[_waterfall(report)]),
        figures(report, report.rungs),
        Section(title="Memory", text=_MEMORY_WORDS, figures=[_memory(report)]),
        *_losses(report),
        *_several(report),
        Section(title="What each rung does", facts={rung.title: rung.why for rung in report.rungs}),
        Section(title="Where this was measured", facts=_facts(report), code=report.command),
    ]
    made = (
        f"Made by Penstock in {report.wall_seconds:.0f} s. The figures are in ladder.json beside this page."
    )
    return page(heading(report), _lead(report), _tiles(report), sections, made)


def heading(report: LadderReport) -> str:
    """What was climbed, in a few words."""
    return f"The ladder of {report.title}"


def _lead(report: LadderReport) -> str:
    machine = report.environment.get("machine", {})
    gpus: Sequence[str] = machine.get("gpus") or ()
    where = f"{machine.get('cores')} cores of {machine.get('processor')}"
    if report.machine.get("device") == "cuda" and gpus:
        where = gpus[0].split(",")[0]
    tried = sum(rung.measured for rung in report.rungs) - 1
    paid = sum(rung.status == "kept" for rung in report.rungs)
    return f"Training on {where}, batch {report.batch}: {tried} optimisations measured, {paid} of them pay."


def _tiles(report: LadderReport) -> list[Tile]:
    """The numbers worth reading first. Speeds are of the same rounds, as their ratio is."""
    best, first = report.best, report.baseline
    tiles = [Tile(value=f"{report.speedup:.2f}×", words="the speed of the plain baseline", lead=True)]
    now = best.samples_per_second
    before = first.samples_per_second.value if first.samples_per_second else None
    if now and before:
        tiles.append(Tile(value=f"{number(now.value)}/s", words=f"{report.unit}, from {number(before)}"))
    flops = best.model_flops_per_second
    if flops and before and first.model_flops_per_second and first.samples_per_second:
        scale, unit = _flop_unit(report)
        each = first.model_flops_per_second.value / first.samples_per_second.value
        words = f"{unit} of the model, from {number(before * each / scale)}"
        tiles.append(Tile(value=number(flops.value / scale), words=words))
    if best.memory_bytes and first.memory_bytes:
        words = f"peak memory, from {number(first.memory_bytes / MIB)}"
        tiles.append(Tile(value=f"{number(best.memory_bytes / MIB)} MiB", words=words))
    if best.loss_difference is not None and report.noise is not None:
        words = f"loss difference; seeds alone make ±{report.noise.deviation:.3f}"
        tiles.append(Tile(value=signed(best.loss_difference, 3), words=words))
    return tiles


def _plan_words(report: LadderReport) -> str:
    words = f"Everything that pays, in one line: {report.plan}."
    changed = ", ".join(f"{name} {value}" for name, value in report.same.model.items())
    if changed:
        words += f" It changes the model: {changed}."
    if report.same.within_noise is False:
        words += " Its loss differs from the baseline's by more than chance explains."
    return words


def _gain_words(report: LadderReport) -> str:
    how = "Each optimisation on top of those before it that pay. One that does not pay is measured, and not kept."
    without = [rung for rung in report.rungs if rung.status == "unsupported"]
    left_out = f"\n\nThese do not apply here, for the reasons below: {titles(without)}." if without else ""
    return (
        f"{how} Speeds are of one joint estimate over all rounds, in which the settings take turns, so that a machine "
        f"that slows down does so for all; whiskers are intervals of 95 %.{left_out}"
    )


def _waterfall(report: LadderReport) -> str:
    bars, level = [], 1.0
    for rung in _drawn(report):
        spread, forecast = rung.to_baseline, rung.forecast
        bars.append(
            Bar(
                label=rung.title,
                state=_STATES.get(rung.status, "absent"),
                reason=rung.status,
                value=spread.value if spread else None,
                low=spread.low if spread else None,
                high=spread.high if spread else None,
                floor=level,
                predicted=forecast.to_baseline if forecast and rung.status != "baseline" else None,
            )
        )
        if rung.status == "kept" and spread:
            level = spread.value
    title = "Speed of each rung relative to the baseline"
    return waterfall(bars, title=title, y_label="speed relative to the baseline")


def _memory(report: LadderReport) -> str:
    bars = [
        Bar(
            label=rung.title,
            state=_STATES.get(rung.status, "absent"),
            reason=rung.status,
            value=None if rung.memory_bytes is None else rung.memory_bytes / MIB,
            predicted=rung.forecast.memory_bytes / MIB if rung.forecast else None,
        )
        for rung in _drawn(report)
    ]
    return memory_bars(bars, title="Peak memory of each rung", y_label="peak memory, MiB")


def _drawn(report: LadderReport) -> list[RungResult]:
    """Rungs that the figures show. Those that do not apply here have only a line in the table."""
    return [rung for rung in report.rungs if rung.status != "unsupported"]


def _losses(report: LadderReport) -> list[Section]:
    noise = report.noise
    if noise is None:
        return []
    steps = list(enumerate(zip(*noise.curves, strict=True), 1))
    band = ([(step, min(found)) for step, found in steps], [(step, max(found)) for step, found in steps])
    text = (
        f"{report.loss_steps} optimizer steps on real data, from the same weights, with samples in the same order. "
        f"The grey band is the baseline under {len(noise.seeds)} seeds, which change both. A rung's difference is that "
        f"of the mean losses of the last quarter of the steps. One standard deviation of the baseline over its "
        f"seeds is {noise.deviation:.4f}, estimated from only {len(noise.seeds)} runs. Curves within {SAME_LOSS:g} of "
        f"each other are drawn as one. A larger batch or image sees other samples, so that its difference is no error "
        f"of arithmetic."
    )
    figures = [
        lines(
            _curves(report), band=band, band_label=f"baseline, {len(noise.seeds)} seeds",
            title="Loss of each rung", x_label="optimizer step", y_label="loss",
        )
    ]  # fmt: skip
    bars = [_difference(rung, 2 * noise.deviation) for rung in report.rungs[1:] if rung.losses]
    if bars:
        figures.append(difference_bars(bars, noise=noise.deviation, title="Loss difference of each rung"))
    return [Section(title="What it does to the loss", text=text, figures=figures)]


def _difference(rung: RungResult, noise: float) -> Bar:
    change = rung.loss_difference
    state: State = (
        "absent"
        if change is None
        else "kept"
        if abs(change) <= noise
        else "higher"
        if change > 0
        else "lower"
    )
    return Bar(label=rung.title, state=state, value=change, reason="no loss")


def _several(report: LadderReport) -> list[Section]:
    """The section on rungs of several processes."""
    rungs = [rung for rung in report.rungs if rung.memory_by_rank]
    if not rungs:
        return []
    text = (
        f"{report.procs} processes on this machine, each with the micro-batch of a single process, so that the global "
        f"batch is {report.procs} times as large. Speeds are of all together, memory is of each. A single process then "
        f"takes the same samples from the same weights, one micro-batch after the other, to check the results."
    )
    columns = [
        Cell("rung", words=True), Cell(f"{report.unit}/s", "all processes"), Cell("to one process", "predicted"),
        Cell("MiB per process", "predicted"), Cell("against one process", words=True),
    ]  # fmt: skip
    rows = []
    for rung in rungs:
        forecast, speed, ratio = rung.forecast, rung.samples_per_second, rung.to_baseline
        equal = equality_words(rung.equality) if rung.equality else "not checked: it builds on one that was"
        cells = [
            Cell(rung.title, rung.plan, words=True),
            Cell(number(speed.value) if speed else ""),
            Cell(f"{ratio.value:.2f}×" if ratio else "", f"{forecast.to_baseline:.2f}×" if forecast else ""),
            Cell(
                " · ".join(map(_mib, rung.memory_by_rank)), _mib(forecast.memory_bytes if forecast else None)
            ),
            Cell(equal, words=True),
        ]
        rows.append((_LOOKS.get(rung.status, "faint"), cells))
    return [Section(title="Several processes", text=text, columns=columns, rows=rows)]


def _curves(report: LadderReport) -> list[Line]:
    """A curve for each rung. Those that are nearly the same share a line and its label."""
    groups: list[list[RungResult]] = []
    for rung in report.rungs:
        if not rung.losses:
            continue
        for group in groups:
            apart = (abs(a - b) for a, b in zip(group[0].losses, rung.losses, strict=True))
            if all(difference <= SAME_LOSS for difference in apart):
                group.append(rung)
                break
        else:
            groups.append([rung])
    return [
        Line(label=titles(g), points=list(enumerate(g[0].losses, 1)), bold=g[0].status == "baseline")
        for g in groups
    ]


def figures(report: LadderReport, rungs: Sequence[RungResult]) -> Section:
    """What was measured of each of `rungs`, one in a row: for the page, and by its first lines for a terminal."""
    against = "to rung before"
    columns = [
        Cell("rung", words=True), Cell("predicted", against, minor=True), Cell("measured", against),
        Cell("in all", "to baseline"), Cell(f"{report.unit}/s", "interval"), Cell(_flop_unit(report)[1], minor=True),
        Cell("MiB", "predicted"), Cell("compile s", minor=True), Cell("loss change", "loss"),
        Cell("verdict", words=True),
    ]  # fmt: skip
    rows = []
    for rung in rungs:
        first = Cell(rung.title, rung.plan if rung.status == "kept" else "", words=True)
        verdict = Cell(rung.status, _shortened(rung.reason), words=True)
        rows.append((_LOOKS.get(rung.status, "faint"), [first, *_row(report, rung), verdict]))
    return Section(title="The figures", columns=columns, rows=rows)


def _row(report: LadderReport, rung: RungResult) -> list[Cell]:
    forecast, before, first = rung.forecast, rung.to_previous, rung.status == "baseline"
    predicted = Cell(f"{forecast.to_previous:.2f}×" if forecast and not first else "")
    samples, flops = rung.samples_per_second, rung.model_flops_per_second
    if not rung.measured or not (before and rung.to_baseline and samples and flops):
        return [predicted, *[Cell("")] * 7]
    ratio = f"{before.value:.2f}×{'' if rung.interleaved else ' *'}"
    compiled, loss, change = rung.compile_seconds, rung.loss, rung.loss_difference
    return [
        predicted,
        Cell("") if first else Cell(ratio, f"{before.low:.2f} – {before.high:.2f}"),
        Cell(f"{rung.to_baseline.value:.2f}×"),
        Cell(number(samples.value), f"{number(samples.low)} – {number(samples.high)}"),
        Cell(number(flops.value / _flop_unit(report)[0])),
        Cell(_mib(rung.memory_bytes), _mib(forecast.memory_bytes if forecast else None)),
        Cell("" if compiled is None else f"{compiled:.1f}"),
        Cell("" if change is None or first else signed(change, 4), "" if loss is None else f"{loss:.4f}"),
    ]


def _mib(size: float | None) -> str:
    return "" if size is None else number(size / MIB)


def _flop_unit(report: LadderReport) -> tuple[float, str]:
    """A unit of FLOP/s that gives readable numbers for this report, and its name."""
    first = report.baseline.model_flops_per_second
    return (1e12, "TFLOP/s") if first and first.value >= 0.1e12 else (1e9, "GFLOP/s")


def titles(rungs: Sequence[RungResult]) -> str:
    """Rungs by name, in a sentence."""
    return ", ".join(rung.title for rung in rungs)


def equality_words(found: Equality) -> str:
    """How far the losses of several processes are from one's, with what is allowed."""
    norms = (
        ""
        if found.norm is None
        else f", gradient norms within {found.norm:.1e} (of {10 * found.tolerance:.1e})"
    )
    return (
        f"{'equal' if found.holds else 'NOT equal'} to one process on the same samples: losses of {found.steps} steps "
        f"within {found.loss:.1e} (of {found.tolerance:.1e}){norms}, relatively"
    )


def _facts(report: LadderReport) -> dict[str, str]:
    planner = f"Machine {report.machine.get('name')} ({report.machine.get('source')})"
    found = facts(report.environment) | {"predictions": f"with {planner}: {_rates(report.machine)}"}
    if report.notes:
        found["notes"] = " ".join(report.notes)
    return found | {"measured again by": "the command above"}


def _rates(machine: Mapping[str, Any]) -> str:
    peaks = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in machine.get("peak_flops", {}).items())
    return f"peak {peaks} TFLOP/s; memory {machine.get('memory_bytes_per_second', 0) / 1e9:.0f} GB/s"


def _shortened(words: str, most: int = 160) -> str:
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"
