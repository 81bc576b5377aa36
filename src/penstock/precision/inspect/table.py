"""A precision report as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.report.precision_figures import percent

if TYPE_CHECKING:
    from penstock.precision.inspect.gradients import LayerGradients
    from penstock.precision.inspect.report import PrecisionReport

MOST_LAYERS = 16
"""Lines of layers that are printed; `PrecisionReport.gradients` has all."""


def describe(report: PrecisionReport) -> str:
    """Operators by type, gradients by layer, and the overflow."""
    parts = [
        f"{report.precision}\nloss {report.loss:.6g} at loss scale {scale_word(report.scale)}, "
        f"{report.loss_fp32:.6g} in fp32",
        _operations(report),
        _gradients(report),
        _overflow(report),
    ]
    return "\n\n".join(parts)


def _operations(report: PrecisionReport) -> str:
    merged: dict[tuple[str, str], tuple[int, int, set[str]]] = {}
    for one in report.operations:
        forward, backward, layers = merged.get((one.name, one.dtype), (0, 0, set()))
        layers.add(one.layer)
        merged[(one.name, one.dtype)] = forward + one.forward, backward + one.backward, layers
    rows = [["operator", "type", "forward", "backward", "layers"]]
    for (name, dtype), (forward, backward, layers) in sorted(merged.items()):
        names = sorted(layer or "the loss" for layer in layers)
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        rows.append([name, dtype, str(forward or ""), str(backward or ""), where])
    return aligned(rows, left=(0, 1, 4))


def _gradients(report: PrecisionReport) -> str:
    at = scale_word(report.compared_scale)
    rows = [
        ["gradients of", "", "values", "zero", "lost at 1", f"at {at}", "inf at 1", f"at {at}", "largest"]
    ]
    totals = [report.total(kind) for kind in ("activations", "weights")]
    rows += [_row(total) for total in totals if total]
    worst = sorted(report.gradients, key=lambda one: (-one.infinite_scaled, -one.infinite, -one.lost))
    troubled = [one for one in worst if one.lost or one.infinite or one.infinite_scaled]
    rows += [_row(one) for one in troubled[:MOST_LAYERS]]
    text = (
        "What fp16 would make of the gradients of the pass in fp32: lost is what becomes zero, inf what becomes "
        "infinite, at loss scale 1 and another.\n\n" + aligned(rows, left=(0, 1))
    )
    hidden = len(troubled) - MOST_LAYERS
    if hidden > 0:
        text += f"\n… and {hidden} more layers that lose some"
    if report.largest_scale is not None:
        text += f"\nAll stay finite up to a loss scale of {scale_word(report.largest_scale)}."
    return text


def _row(one: LayerGradients) -> list[str]:
    shares = (one.zero, one.lost, one.lost_scaled, one.infinite, one.infinite_scaled)
    return [one.layer, one.kind, f"{one.values:,}", *map(percent, shares), f"{one.largest:.3g}"]


def _overflow(report: PrecisionReport) -> str:
    if report.overflow is None:
        return "No overflow."
    return f"An overflow begins in {report.overflow}."


def scale_word(scale: float) -> str:
    """`2^16`, or the plain number where it is no power of two, or a small one."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 0 <= exponent - 1 < 4 else f"{scale:g}"


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Columns two blanks apart, numbers flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
