"""Judges what changes results: whether it pays, and whether several processes compute what one does. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.ladder.result import Equality, RungResult, Status
from penstock.ladder.rung import Rung
from penstock.ladder.statistics import Verdict

TOLERANCES = {"fp32": 1e-5, "bf16": 1.6e-2, "fp16": 1e-3}
"""Relative difference allowed of the losses of several processes and one, by the type they compute in: ranks add
gradients up in another order. Those of half types are torch's own for numbers of that type; fp32's is that of losses
after some steps, of which 3e-7 was measured."""
DEVIATIONS = 2.0
"""Standard deviations of the loss over seeds within which a setting counts as giving the same results."""
NO_GAIN: dict[Verdict, str] = {
    "slower": "slower",
    "same": "no difference",
    "open": "no clear gain",
    "faster": "",
}
"""Why a rung of this verdict is not kept."""


UNPROVEN = "part of the Plan, though its own gain is within the noise"

WORTH = "its step is within the noise, but the Plan is surely slower without it"


def judged(result: RungResult, rung: Rung, verdict: Verdict) -> tuple[Status, str]:
    """The status of a rung that was measured on top of the best, and the reason."""
    if not rung.carried:
        return "reported", "measured for comparison, not built upon"
    if any(not math.isfinite(loss) for loss in result.losses):
        return "not kept", "its loss became infinite or NaN"
    if result.equality is not None and not result.equality.holds:
        return "not kept", "its results differ from those of one process"
    change, allowed = result.loss_difference, result.allowed_difference
    if rung.results == "rounding" and change is not None and allowed is not None and abs(change) > allowed:
        return "not kept", "its loss differs by more than seeds and rounding explain"
    if verdict != "faster":
        return "not kept", NO_GAIN[verdict]
    return ("kept" if rung.searched else "offered"), ""


def tail_mean(curve: Sequence[float]) -> float:
    """Mean over the last quarter: one step's loss is mostly that of its samples."""
    tail = curve[-max(1, len(curve) // 4) :]
    return sum(tail) / len(tail)


def equality(
    plan: Plan,
    losses: Sequence[float],
    others: Sequence[float],
    norms: Sequence[float],
    other_norms: Sequence[float],
) -> Equality:
    """Losses and gradient norms of several processes under `plan` against those of one."""
    return Equality(
        steps=len(losses),
        loss=_largest_difference(losses, others),
        norm=_largest_difference(norms, other_norms) if norms and other_norms else None,
        tolerance=TOLERANCES[numerics_of(plan).compute],
    )


def _largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference, infinite where only one is finite; a loss scale may skip a step for both."""
    worst = 0.0
    for a, b in zip(losses, expected, strict=True):
        if math.isfinite(a) != math.isfinite(b):
            return math.inf
        if math.isfinite(a):
            worst = max(worst, abs(a - b) / max(abs(b), 1e-12))
    return worst
