"""Judges a rung by its measurements. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.ladder.result import Equality, Estimate, RungResult, Status

PAYS_FROM = 1.01
"""A rung pays when its ratio is at least this, and above 1 by two standard errors."""

HOPELESS = 0.5
"""A rung this much slower than the best is timed in two rounds only, and its loss is not run."""
TOLERANCES = {"fp32": 1e-5, "bf16": 1.6e-2, "fp16": 1e-3}
"""Relative difference allowed of the losses of several processes and one, by the type they compute in: ranks add
gradients up in another order. Those of half types are torch's own for numbers of that type; fp32's is that of losses
after some steps, of which 3e-7 was measured."""


def verdict(result: RungResult, *, carried: bool) -> tuple[Status, str]:
    """The status of a measured rung, and the reason."""
    if not carried:
        return "reported", "measured for comparison, not built upon"
    if any(not math.isfinite(loss) for loss in result.losses):
        return "not kept", "its loss became infinite or NaN"
    assert result.to_previous is not None
    if result.equality is not None and not result.equality.holds:
        return "not kept", "its results differ from those of one process"
    if result.to_previous.value >= PAYS_FROM and result.to_previous.low > 1.0:
        return "kept", ""
    if result.to_previous.high < HOPELESS:
        return "not kept", "far slower" if result.equality else "far slower, so its loss was not run"
    return "not kept", "slower" if result.to_previous.high < 1.0 else "no clear gain"


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
        loss=_apart(losses, others),
        norm=_apart(norms, other_norms) if norms and other_norms else None,
        tolerance=TOLERANCES[numerics_of(plan).compute],
    )


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference, infinite where only one is finite; a loss scale may skip a step for both."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if math.isfinite(one) != math.isfinite(other):
            return math.inf
        if math.isfinite(one):
            worst = max(worst, abs(one - other) / max(abs(other), 1e-12))
    return worst


def spread(values: Sequence[float]) -> Estimate:
    """The median of paired ratios or of speeds, and two standard errors of it, judged by the quartiles."""
    median = statistics.median(values)
    if len(values) == 1:
        return Estimate.exact(median)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    error = 2.0 * 0.93 * (high - low) / math.sqrt(len(values))
    return Estimate(value=median, low=median - error, high=median + error, rounds=len(values))


def undecided(ratio: Estimate) -> bool:
    """Whether a ratio would be a gain if only it scattered less: a case for more rounds."""
    return ratio.value >= PAYS_FROM and ratio.low <= 1.0
