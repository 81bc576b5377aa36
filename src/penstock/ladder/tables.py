"""Parts of a report that page, notebook and terminal share: the table of figures, and the sentences that go with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.ladder.result import Chosen, Equality, Estimate, LadderReport, Nearest, RungResult
from penstock.report.chart import number, signed
from penstock.report.page import Cell, Section

MIB = 2.0**20
LOOKS: Mapping[str, str] = {"baseline": "", "kept": "strong", "unproven": "", "offered": ""}
"""Style of a rung's row by status; all others are faint."""


def heading(report: LadderReport) -> str:
    """Title of a report, in a few words."""
    return f"The ladder of {report.title}" if report.script is None else f"Tuning {report.title}"


def file_name(report: LadderReport) -> str:
    """Name of the report's files, without suffix."""
    return "ladder" if report.script is None else "tune"


def figures(report: LadderReport, rungs: Sequence[RungResult]) -> Section:
    """Measurements of `rungs`, one row each; the page shows all columns, a terminal the first."""
    columns = [
        Cell("rung", words=True), Cell("step", "to the one before"), Cell("in all", "to baseline"),
        Cell("worth", "without it", rank=2), Cell("predicted", "in all", rank=4),
        Cell(f"{report.unit}/s", "interval", rank=1), Cell(flop_unit(report)[1], rank=7),
        Cell("CPU time", "in all", rank=6), Cell("MiB", "predicted", rank=3), Cell("compile s", rank=5),
        Cell("loss change", "loss" if report.script is None else "explained", rank=2),
        Cell("s to loss", "steps", rank=6), Cell("verdict", words=True),
    ]  # fmt: skip
    rows = []
    for rung in rungs:
        first = Cell(rung.title, rung.plan if rung.name in report.same_results.rungs else "", words=True)
        verdict = Cell(rung.status, rung.reason, words=True)
        rows.append((LOOKS.get(rung.status, "faint"), [first, *_row(report, rung), verdict]))
    return Section(title="The figures", columns=columns, rows=rows)


def _row(report: LadderReport, rung: RungResult) -> list[Cell]:
    forecast, first, to_loss = rung.forecast, rung.status == "baseline", rung.seconds_to_loss
    samples, flops, change = rung.samples_per_second, rung.model_flops_per_second, rung.loss_difference
    return [
        Cell("") if first else ratio(rung.to_previous, "" if rung.interleaved else " *"),
        ratio(rung.to_baseline),
        ratio(rung.worth),
        Cell(f"{forecast.to_baseline:.2f}×" if forecast and not first else ""),
        Cell(number(samples.value), f"{number(samples.low)} – {number(samples.high)}")
        if samples
        else Cell(""),
        Cell(number(flops.value / flop_unit(report)[0]) if flops else ""),
        Cell("") if first else ratio(rung.processor_to_baseline),
        Cell(mebibytes(rung.memory_bytes), mebibytes(forecast.memory_bytes if forecast else None)),
        Cell(seconds(rung.compile_seconds)),
        Cell("" if change is None or first else signed(change, 4), _beside(report, rung)),
        Cell("" if to_loss is None else number(to_loss), f"{rung.steps_to_loss or ''}"),
    ]


def _beside(report: LadderReport, rung: RungResult) -> str:
    """The rung's loss; for a script the allowed difference, because its settings run for different numbers of steps."""
    if report.script is None:
        return "" if rung.loss is None else f"{rung.loss:.4f}"
    known = rung.allowed_difference is not None and rung.status != "baseline"
    return f"±{rung.allowed_difference:.4f}" if known else ""


def ratio(estimate: Estimate | None, note: str = "") -> Cell:
    if estimate is None:
        return Cell("")
    between = f"{estimate.low:.2f} – {estimate.high:.2f}" if estimate.high > estimate.low else ""
    return Cell(times(estimate) + note, between)


def times(estimate: Estimate) -> str:
    """A ratio in the form that page, table and terminal share."""
    return f"{estimate.value:.2f}×"


def mebibytes(size: float | None) -> str:
    return "" if size is None else number(size / MIB)


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def flop_unit(report: LadderReport) -> tuple[float, str]:
    """A unit of FLOP/s that gives readable numbers for this report, and its name."""
    first = report.baseline.model_flops_per_second
    return (1e12, "TFLOP/s") if first and first.value >= 0.1e12 else (1e9, "GFLOP/s")


def equality_words(equality: Equality) -> str:
    """How far the losses of several processes differ from those of one process, and how far they may."""
    norms = ""
    if equality.norm is not None:
        norms = f", gradient norms within {equality.norm:.1e} (of {10 * equality.tolerance:.1e})"
    return (
        f"{'equal' if equality.holds else 'NOT equal'} to one process on the same samples: losses of "
        f"{equality.steps} steps within {equality.loss:.1e} (of {equality.tolerance:.1e}){norms}, relatively"
    )


def plain(report: LadderReport) -> str:
    """The baseline in words."""
    return "the plain baseline" if report.script is None else "the script as it is"


def stays(report: LadderReport) -> str:
    """The advice if nothing is faster."""
    return "the plain Plan remains" if report.script is None else "the script stays as it is"


def plan_words(report: LadderReport, chosen: Chosen) -> str:
    """A Plan's speedup, the Plan itself, and its effect on the loss."""
    if not chosen.rungs:
        return nothing_words(report)
    gain = chosen.speedup
    predicted = "" if chosen.predicted is None else f", predicted {chosen.predicted:.2f}×"
    speed = "the baseline's speed" if report.script is None else "the speed of the script as it is"
    words = f"{times(gain)} {speed} ({gain.low:.2f} to {gain.high:.2f}){predicted}. "
    words += f"Its Plan is {chosen.plan}."
    if changed := ", ".join(f"{name} {value}" for name, value in chosen.model.items()):
        words += f" It changes model or data: {changed}."
    if chosen.loss_difference is not None and report.noise is not None:
        within = "within" if chosen.within_noise else "outside"
        explained = f"the ±{2 * report.noise.deviation:.4f} of chance (two standard deviations over seeds)"
        if report.script is not None:
            explained = "what seeds and rounding explain"
        words += f" Its loss differs by {signed(chosen.loss_difference, 4)}, {within} {explained}."
    return words


def in_plans(rung: RungResult) -> bool:
    """Whether a rung is the baseline or part of a recommended Plan."""
    return rung.status in ("baseline", "kept", "unproven", "offered")


def beyond_words(nearest: Nearest | None) -> str:
    """The finding if no Plan is faster than the baseline beyond the noise; widths are never rounded down."""
    if nearest is None:
        return "nothing that applies here was measured in this time"
    if nearest.width >= 1:
        return "no gain could be told from noise"
    return f"nothing beyond ±{math.ceil(1000 * nearest.width) / 10:.1f} %"


def nothing_words(report: LadderReport) -> str:
    """Words and advice if no Plan is faster than the baseline beyond the noise."""
    nearest = report.nearest
    if nearest is None:
        return f"{beyond_words(None)}, so {stays(report)}."
    best, others_busy = nearest.ratio, report.others_busy
    climb = "climb" if report.script is None else "tuning"
    words = (
        f"{beyond_words(nearest).capitalize()} on this machine, so {stays(report)}. "
        f"The most promising, {nearest.plan}, "
    )
    if best.high < 1.0:
        return f"{words}is slower: {times(best)} ({best.low:.2f} to {best.high:.2f})."
    words += f"measures {times(best)} ({best.low:.2f} to {best.high:.2f}), which may be chance."
    quiet = " on a quieter machine" if others_busy and others_busy > QUIET else ""
    if nearest.budget is not None:
        longer = f"--budget {math.ceil(nearest.budget / 10) * 10}"
        words += f" A longer {climb} ({longer}){quiet and ' or one' + quiet} should decide it."
    elif quiet:
        words += f" A {climb}{quiet} should decide it."
    return words


QUIET = 0.1
"""Most cores that other programs keep busy on a machine that counts as quiet."""
SCATTERED = 6.0
"""If the baseline's interval against itself is wider than this many noise floors, scatter between rounds hides small
gains, and not the floor."""
MOST_RATIO = 100.0
"""An interval whose upper end is more than this many times its lower end comes from too few rounds to say anything."""


def noise_words(report: LadderReport) -> str:
    """The noise floor: how much the baseline differs from itself."""
    if report.control is None:
        return ""
    ratio, floor = report.control.ratio, report.control.floor
    decided = ratio.high <= MOST_RATIO * ratio.low
    known = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
    interval = known if decided else f"{ratio.rounds} rounds give no interval"
    twice = f"the baseline, built twice, differs from itself by {ratio.value - 1:+.1%} ({interval})"
    if not decided or math.log(ratio.high / ratio.low) > SCATTERED * math.log1p(floor):
        return f"{twice[0].upper()}{twice[1:]}: rounds scatter more than builds do, so that small gains stay undecided."
    return f"Noise floor {floor:.1%}: {twice}."
