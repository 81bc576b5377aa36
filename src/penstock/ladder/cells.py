"""The figures of a rung in words, the same for terminal and page; empty where there is no figure."""

from __future__ import annotations

from penstock.ladder.result import LadderReport, RungResult
from penstock.report.chart import number, signed

MIB = 2.0**20


def flop_unit(report: LadderReport) -> tuple[float, str]:
    """A unit of FLOP/s that gives readable numbers for this report, and its name."""
    first = report.baseline.model_flops_per_second
    return (1e12, "TFLOP/s") if first and first.median >= 0.1e12 else (1e9, "GFLOP/s")


def predicted(rung: RungResult) -> str:
    """The planner's ratio to the rung before."""
    return f"{rung.forecast.to_previous:.2f}×" if rung.forecast and rung.status != "baseline" else ""


def ratio(rung: RungResult) -> str:
    """The measured ratio to the rung before, with a star where it was not interleaved."""
    if rung.to_previous is None or rung.status == "baseline":
        return ""
    return f"{rung.to_previous.median:.2f}×" + ("" if rung.interleaved else " *")


def of_baseline(rung: RungResult) -> str:
    """The measured ratio to the baseline."""
    return f"{rung.to_baseline.median:.2f}×" if rung.to_baseline else ""


def speeds(report: LadderReport, rung: RungResult) -> tuple[str, str]:
    """Samples and FLOPs per second."""
    scale, _ = flop_unit(report)
    samples = number(rung.samples_per_second.median) if rung.samples_per_second else ""
    flops = number(rung.model_flops_per_second.median / scale) if rung.model_flops_per_second else ""
    return samples, flops


def memory(rung: RungResult) -> str:
    """Peak memory in MiB."""
    return number(rung.memory_bytes / MIB) if rung.memory_bytes is not None else ""


def equality(rung: RungResult) -> str:
    """How far the losses of several processes are from one's, relatively."""
    return f"{rung.equality.loss:.0e}" if rung.equality else ""


def equality_words(rung: RungResult) -> str:
    """The same in a sentence, with what is allowed."""
    found = rung.equality
    if found is None:
        return ""
    verdict = "equal" if found.holds else "NOT equal"
    norms = (
        ""
        if found.norm is None
        else f", gradient norms within {found.norm:.1e} (of {10 * found.tolerance:.1e})"
    )
    return (
        f"{verdict} to one process on the same samples: losses of {found.steps} steps within {found.loss:.1e} "
        f"(of {found.tolerance:.1e}){norms}, relatively"
    )


def compiling(rung: RungResult) -> str:
    """Seconds of compilation."""
    return f"{rung.compile_seconds:.1f}" if rung.compile_seconds is not None else ""


def loss(rung: RungResult) -> str:
    """The loss less the baseline's."""
    if rung.loss_difference is None or rung.status == "baseline":
        return ""
    return signed(rung.loss_difference, 4)


def titles(rungs: list[RungResult] | tuple[RungResult, ...]) -> str:
    """Rungs by name, in a sentence."""
    return ", ".join(rung.title for rung in rungs)
