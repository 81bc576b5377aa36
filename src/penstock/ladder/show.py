"""A climb as a table for the terminal, and as a page and JSON for everyone else. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.ladder.result import LadderReport, RungResult
from penstock.report.figures import (
    Bar,
    Curve,
    Dot,
    State,
    difference_dots,
    loss_curves,
    memory_bars,
    waterfall,
)
from penstock.report.page import Cell, Section, Tile, page
from penstock.report.svg import number

if TYPE_CHECKING:
    from rich.table import Table

_STATES: Mapping[str, State] = {"baseline": "baseline", "kept": "kept", "left": "left", "reported": "left"}
_MIB = 2.0**20


def write(report: LadderReport, folder: Path | str) -> tuple[Path, Path]:
    """Write ladder.html and ladder.json into a folder, which is made; returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    html, data = folder / "ladder.html", folder / "ladder.json"
    html.write_text(to_html(report), encoding="utf-8")
    data.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return html, data


def table(report: LadderReport) -> Table:
    """One row per rung, for a terminal; `remarks` has the reasons in full."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=_heading(report), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    made.add_column("rung", no_wrap=True)
    _, flops = _flop_unit(report)
    for name in ("predicted", "measured", "in all", f"{report.unit}/s", flops, "MiB", "compile s", "loss"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    styles = {"baseline": "bold", "kept": "green", "left": "dim", "reported": "dim"}
    for rung in report.rungs:
        cells = [""] * 7
        if rung.measured:
            cells = [
                _ratio(rung),
                _of_baseline(rung),
                *_speeds(report, rung),
                _memory(rung),
                _compiling(rung),
                _loss(rung),
            ]
        made.add_row(
            rung.title, _predicted(rung), *cells, rung.status, style=styles.get(rung.status, "yellow")
        )
    return made


def remarks(report: LadderReport) -> list[str]:
    """What the table has no room for: why rungs were not measured or not kept, and notes on the whole climb."""
    reasons: dict[str, list[str]] = {}
    for rung in report.rungs:
        if rung.reason:
            reasons.setdefault(f"{rung.status}: {rung.reason}", []).append(rung.title)
    said = [f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items()]
    if any(not rung.interleaved for rung in report.rungs):
        said.append("* timed after the others and not in turn with them: memory did not hold both.")
    return [*said, *report.notes]


def to_html(report: LadderReport) -> str:
    """The whole report as one self-contained page."""
    best, first = report.best, report.baseline
    tiles = [Tile(value=f"{report.speedup:.2f}×", words="faster than the plain baseline", lead=True)]
    if best.samples_per_second and first.samples_per_second:
        now, before = best.samples_per_second.median, first.samples_per_second.median
        tiles.append(Tile(value=f"{number(now)}/s", words=f"{report.unit}, from {number(before)}"))
    if best.model_flops_per_second and first.model_flops_per_second:
        scale, unit = _flop_unit(report)
        now, before = best.model_flops_per_second.median / scale, first.model_flops_per_second.median / scale
        tiles.append(Tile(value=number(now), words=f"{unit} of the model, from {number(before)}"))
    if best.memory_bytes and first.memory_bytes:
        now, before = best.memory_bytes / _MIB, first.memory_bytes / _MIB
        tiles.append(Tile(value=f"{number(now)} MiB", words=f"peak memory, from {number(before)}"))
    if best.loss_difference is not None and report.noise is not None:
        words = f"loss difference; chance alone makes ±{report.noise.deviation:.3f}"
        tiles.append(Tile(value=f"{best.loss_difference:+.3f}", words=words))
    sections = [
        Section(title="The best Plan", text=_plan_words(report), code=report.train_command),
        Section(title="What each optimisation gains", text=_gain_words(report), figures=[_waterfall(report)]),
        _table_section(report),
        Section(title="Memory", text=_MEMORY_WORDS, figures=[_memory_figure(report)]),
        *_loss_sections(report),
        _why_section(report),
        Section(title="Where this was measured", facts=_facts(report), code=report.command),
    ]
    made = f"Made by Penstock in {report.wall_seconds:.0f} s."
    return page(_heading(report), _lead(report), tiles, sections, made)


_MEMORY_WORDS = (
    "The most that tensors take at any moment of one step: weights, gradients, optimizer state, activations. "
    "Diamonds are what the planner foretold."
)


def _heading(report: LadderReport) -> str:
    return f"{'Single rungs' if report.alone else 'The ladder'} of {report.title}"


def _lead(report: LadderReport) -> str:
    machine = report.environment.get("machine", {})
    gpus: Sequence[str] = machine.get("gpus") or ()
    device = report.machine.get("device")
    where = (
        gpus[0].split(",")[0]
        if device == "cuda" and gpus
        else f"{machine.get('cores')} cores of {machine.get('processor')}"
    )
    tried = len(report.rungs) - 1
    paid = sum(rung.status == "kept" for rung in report.rungs)
    return f"Training on {where}, batch {report.batch}: {tried} optimisations tried, {paid} of them pay."


def _plan_words(report: LadderReport) -> str:
    changed = ", ".join(f"{name} {value}" for name, value in report.model.items())
    words = f"Everything that paid, in one line: {report.plan}."
    if changed:
        words += f" It changes the model: {changed}."
    outside = report.outside_noise()
    if outside:
        names = ", ".join(rung.title for rung in outside)
        words += (
            f" Beyond chance, the loss of these rungs differs from the baseline's: {names}. Judge for yourself whether "
            f"their speed is worth it, or leave them out with --skip."
        )
    return words


def _gain_words(report: LadderReport) -> str:
    how = (
        "Each optimisation by itself, against the plain baseline."
        if report.alone
        else "Each optimisation on top of all before it that paid. One that does not is measured, shown, and not kept."
    )
    return (
        f"{how} Medians of up to {report.rounds} rounds in which the contenders take turns, so that a machine that "
        f"slows down does so for all; whiskers are quartiles. A step pays from 1 % on, if three rounds in four agree."
    )


def _bars(report: LadderReport, *, memory: bool) -> list[Bar]:
    bars = []
    level = 1.0
    for rung in report.rungs:
        state = _STATES.get(rung.status, "absent")
        shared: dict[str, Any] = {
            "label": rung.title, "state": state, "reason": _short(rung) if state == "absent" else ""
        }  # fmt: skip
        forecast = rung.forecast
        if memory:
            value = None if rung.memory_bytes is None else rung.memory_bytes / _MIB
            predicted = forecast.memory_bytes / _MIB if forecast else None
            bars.append(Bar(**shared, value=value, predicted=predicted))
            continue
        spread = rung.to_baseline
        bars.append(
            Bar(
                **shared,
                value=spread.median if spread else None,
                low=spread.low if spread else None,
                high=spread.high if spread else None,
                floor=1.0 if report.alone else level,
                predicted=forecast.to_baseline if forecast and rung.status != "baseline" else None,
            )
        )
        if rung.status == "kept" and spread:
            level = spread.median
    return bars


def _waterfall(report: LadderReport) -> str:
    title = "Speed of each rung relative to the baseline"
    return waterfall(_bars(report, memory=False), title=title, y_label="speed relative to the baseline")


def _memory_figure(report: LadderReport) -> str:
    return memory_bars(
        _bars(report, memory=True), title="Peak memory of each rung", y_label="peak memory, MiB"
    )


def _loss_sections(report: LadderReport) -> list[Section]:
    noise = report.noise
    if noise is None:
        return []
    drawn = [rung for rung in report.rungs if rung.losses]
    curves = [Curve(label=rung.title, values=rung.losses, bold=rung.status == "baseline") for rung in drawn]
    steps = list(zip(*noise.curves, strict=True))
    band = ([min(step) for step in steps], [max(step) for step in steps])
    seeds = f"baseline, {len(noise.seeds)} seeds"
    text = (
        f"{report.loss_steps} optimizer steps on real data, from the same weights, in the same order of samples. The "
        f"grey band is the baseline under {len(noise.seeds)} seeds, which change both. A rung's difference is that of "
        f"the mean loss over the last quarter of the steps; one standard deviation of the baseline over its seeds is "
        f"{noise.deviation:.4f}, estimated from {len(noise.seeds)} runs only. A larger batch or image sees other "
        f"samples, so its difference is no error of arithmetic."
    )
    dots = [
        Dot(label=rung.title, value=rung.loss_difference)
        for rung in report.rungs
        if rung.status != "baseline"
    ]
    figures = [loss_curves(curves, band=band, band_label=seeds, title="Loss of each rung")]
    if dots:
        figures.append(difference_dots(dots, noise=noise.deviation, title="Loss difference of each rung"))
    return [Section(title="What it does to the loss", text=text, figures=figures)]


def _table_section(report: LadderReport) -> Section:
    columns = [
        Cell("rung", words=True), Cell("predicted", "of the rung before"), Cell("measured", "of the rung before"),
        Cell("of baseline"), Cell(f"{report.unit}/s", "quartiles"), Cell(_flop_unit(report)[1]),
        Cell("peak MiB", "predicted"), Cell("compile s"), Cell("loss", "less baseline's"), Cell("verdict", words=True),
    ]  # fmt: skip
    if report.alone:
        columns[1:3] = [Cell("predicted", "of baseline"), Cell("measured", "of baseline")]
    rows = []
    for rung in report.rungs:
        state = _STATES.get(rung.status, "absent")
        verdict = Cell(rung.status, _sentence(rung.reason), words=True)
        first = Cell(rung.title, _sentence(rung.plan) if rung.status == "kept" else "", words=True)
        rows.append((state, [first, *_figures_of(report, rung), verdict]))
    return Section(title="The figures", columns=columns, rows=rows)


def _figures_of(report: LadderReport, rung: RungResult) -> list[Cell]:
    forecast = rung.forecast
    if not rung.measured:
        return [Cell(_predicted(rung)), *[Cell("")] * 7]
    spread, before = rung.samples_per_second, rung.to_previous
    samples, flops = _speeds(report, rung)
    return [
        Cell(_predicted(rung)),
        Cell(
            _ratio(rung),
            f"{before.low:.2f} – {before.high:.2f}" if before and rung.status != "baseline" else "",
        ),
        Cell(_of_baseline(rung)),
        Cell(samples, f"{number(spread.low)} – {number(spread.high)}" if spread else ""),
        Cell(flops),
        Cell(_memory(rung), number(forecast.memory_bytes / _MIB) if forecast else ""),
        Cell(_compiling(rung)),
        Cell(f"{rung.loss:.4f}" if rung.loss is not None else "", _loss(rung)),
    ]


def _why_section(report: LadderReport) -> Section:
    return Section(title="What each rung does", facts={rung.title: rung.why for rung in report.rungs})


def _facts(report: LadderReport) -> dict[str, str]:
    environment = report.environment
    machine: dict[str, Any] = environment.get("machine", {})
    planner = f"Machine {report.machine.get('name')} ({report.machine.get('source')})"
    facts = {
        "processor": f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('threads')} threads",
        "memory": f"{(machine.get('memory_bytes') or 0) / 2**30:.1f} GiB",
        "GPU": "; ".join(machine.get("gpus") or ()) or "none",
        "system": str(machine.get("system")),
        "versions": ", ".join(
            f"{name} {version}" for name, version in environment.get("versions", {}).items()
        ),
        "commit": str(environment.get("commit") or "none"),
        "time": str(environment.get("time")),
        "predictions": f"with {planner}: {_rates(report.machine)}",
    }
    if report.notes:
        facts["notes"] = " ".join(report.notes)
    facts["again with"] = "the command below"
    return facts


def _rates(machine: Mapping[str, Any]) -> str:
    peaks = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in machine.get("peak_flops", {}).items())
    return f"peak {peaks} TFLOP/s; memory {machine.get('memory_bytes_per_second', 0) / 1e9:.0f} GB/s"


def _predicted(rung: RungResult) -> str:
    return f"{rung.forecast.to_previous:.2f}×" if rung.forecast and rung.status != "baseline" else ""


def _ratio(rung: RungResult) -> str:
    if rung.to_previous is None or rung.status == "baseline":
        return ""
    return f"{rung.to_previous.median:.2f}×" + ("" if rung.interleaved else " *")


def _of_baseline(rung: RungResult) -> str:
    return f"{rung.to_baseline.median:.2f}×" if rung.to_baseline else ""


def _flop_unit(report: LadderReport) -> tuple[float, str]:
    """FLOP/s in thousands of millions, or in millions of millions where there are that many."""
    first = report.baseline.model_flops_per_second
    return (1e12, "TFLOP/s") if first and first.median >= 0.1e12 else (1e9, "GFLOP/s")


def _speeds(report: LadderReport, rung: RungResult) -> tuple[str, str]:
    scale, _ = _flop_unit(report)
    samples = number(rung.samples_per_second.median) if rung.samples_per_second else ""
    flops = number(rung.model_flops_per_second.median / scale) if rung.model_flops_per_second else ""
    return samples, flops


def _memory(rung: RungResult) -> str:
    return number(rung.memory_bytes / _MIB) if rung.memory_bytes is not None else ""


def _compiling(rung: RungResult) -> str:
    return f"{rung.compile_seconds:.1f}" if rung.compile_seconds is not None else ""


def _loss(rung: RungResult) -> str:
    if rung.loss_difference is None or rung.status == "baseline":
        return ""
    return f"{rung.loss_difference:+.4f}"


def _short(rung: RungResult) -> str:
    """A status of a word or two, for a bar's place."""
    return {"unsupported": "not applicable"}.get(rung.status, rung.status)


def _sentence(words: str, most: int = 160) -> str:
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"
