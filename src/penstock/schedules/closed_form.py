"""Makespan, bubble and memory of the known schedules for equal stages, without simulation.

The terms without transfers are those of Narayanan et al., SC 2021, §2.2 and Qi et al., ICLR 2024, Table 2.
The number of transfers on the critical path is derived here. Each formula is used only where it is exact;
tests compare it with the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedules.costs import Bubble, Number
from penstock.schedules.generate import ScheduleName, interleaved_warm_up, micro_batch_groups, require_shape


@dataclass(frozen=True, slots=True)
class ClosedForm(Bubble):
    """The result for a schedule of equal stages, in the unit of its costs."""

    makespan: Number
    ideal: Number
    """The time that each rank computes, which is the makespan without a bubble."""


def closed_form(
    name: ScheduleName,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    forward: Number,
    backward_input: Number,
    backward_weight: Number,
    transfer: Number = 0,
) -> ClosedForm | None:
    """The result of `simulate(generate(…), Costs(…))` if a formula gives exactly that, else None.

    The costs are for one stage, which is one of `chunks` parts of a rank's model. GPipe and 1F1B are always
    exact. Interleaved is exact if a transfer takes no longer than a forward or a backward (in groups of more
    than p micro-batches, no longer than the share that `_interleaved` states). ZB-H1 is exact if W takes no
    longer than F and I, and a transfer no longer than half of W; without transfers also for any W if m ≥ p.

    Raises `ConfigError` for an unknown name, counts below 1 and negative costs.
    """
    require_shape(name, ranks, micro_batches, chunks)
    if not min(forward, backward_input, backward_weight, transfer) >= 0:
        raise ConfigError("A cost of a schedule cannot be negative.")
    stage = _Stage(forward, backward_input, backward_weight, transfer if ranks > 1 else 0)
    makespan = _FORMULAS[name](ranks, micro_batches, chunks, stage)
    if makespan is None:
        return None
    return ClosedForm(makespan, micro_batches * chunks * (forward + backward_input + backward_weight))


class _Stage(NamedTuple):
    forward: Number
    into: Number
    weight: Number
    transfer: Number


_Formula = Callable[[int, int, int, _Stage], Number | None]


def _gpipe(p: int, m: int, _: int, stage: _Stage) -> Number:
    """The pipeline fills and empties once in each direction."""
    forward, into, weight, transfer = stage
    return (m + p - 1) * (forward + into + weight) + 2 * (p - 1) * transfer


def _one_f_one_b(p: int, m: int, _: int, stage: _Stage) -> Number:
    """As GPipe, but in the steady state a rank waits for a transfer in each direction before each pair,
    except one in p.

    1F1B has no slack: the first rank holds p micro-batches, and p pairs take p pairs' time plus 2 (p − 1)
    transfers to return to it.
    """
    forward, into, weight, transfer = stage
    hops = p - 1 + (m - 1) - -(-(m - 1) // p)
    return (m + p - 1) * (forward + into + weight) + 2 * hops * transfer


def _interleaved(p: int, m: int, v: int, stage: _Stage) -> Number | None:
    """Warm-up runs two micro-batches ahead per hop, so transfers shorter than a forward and a backward are
    hidden.

    Only one trip through the stages and back is not hidden. In groups of g > p micro-batches, the way from
    the last rank back to the first has g − p slots of slack, which hide p transfers.
    """
    if v == 1:
        return _one_f_one_b(p, m, v, stage)
    forward, into, weight, transfer = stage
    pair, slot = forward + into + weight, min(forward, into + weight)
    if transfer > slot:
        return None
    if m < p:  # every chunk of a rank waits for the previous one: v·p stages in a row
        return (v * p + m - 1) * pair + 2 * (v * p - 1) * transfer
    groups = micro_batch_groups(p, m)
    if any(p * transfer > (size - p) * slot for size in (groups[0], groups[-1]) if size > p):
        return None
    # The way back to the first rank is exposed forward in the first group, and backward in the last.
    rounds = (groups[0] == p) + (groups[-1] == p)
    return (m * v + p - 1) * pair + (2 * (p - 1) + (v - 1) * p * rounds) * transfer


def _zb_h1(p: int, m: int, _: int, stage: _Stage) -> Number | None:
    """Only F and I delay filling and emptying; each rank but the first postpones W until the end."""
    forward, into, weight, transfer = stage
    if weight <= min(forward, into) and 2 * transfer <= weight:
        hops = 2 * (p - 1) + 2 * max(0, min(m, p + 1) - 2)
        put_off = (min(m, p) - 1) * weight
        return m * (forward + into + weight) + (p - 1) * (forward + into) - put_off + hops * transfer
    if transfer == 0 and m >= p:
        return m * (forward + into + weight) + (p - 1) * max(forward, into, forward + into - weight)
    return None


_FORMULAS: dict[str, _Formula] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
}


class Held(NamedTuple):
    """The most that a rank holds at one time, in activations of one stage and one micro-batch."""

    whole: int
    for_weight: int
    """Activations after I, of which only `kept_for_weight` remains."""


def held(name: ScheduleName, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Held:
    """The most that `rank` holds: min(p − r, m) micro-batches for 1F1B. Raises `ConfigError`."""
    require_shape(name, ranks, micro_batches, chunks)
    if not 0 <= rank < ranks:
        raise ConfigError(f"There is no rank {rank} among {ranks}; ranks are counted from 0.")
    if name == "gpipe":
        return Held(micro_batches, 0)
    if name == "zb-h1":
        warm_up = min(micro_batches, ranks - 1 - rank)
        pairs = micro_batches - warm_up
        return Held(warm_up + min(1, pairs), min(rank, max(0, pairs - 1)))
    total = micro_batches * chunks
    warm_up = interleaved_warm_up(rank, ranks, chunks, micro_batch_groups(ranks, micro_batches)[0], total)
    return Held(min(total, warm_up + 1), 0)
