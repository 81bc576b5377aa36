"""The common schedules, for any number of ranks, micro-batches and model chunks.

Stage s is on rank s mod p, so rank r with v chunks holds stages r, r + p, ….
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from penstock.config.convert import nearest
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.schedules.schedule import Action, Kind, Schedule

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def generate(name: ScheduleName, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`. `chunks` (model chunks per rank) is only for `interleaved`.

    Raises `ConfigError` for an unknown name and for counts below 1.
    """
    problems = list(_shape_problems(name, ranks, micro_batches, chunks))
    if problems:
        raise ConfigError(problems)
    if name == "zb-h1":
        return Schedule(tuple(tuple(_zb_h1(rank, ranks, micro_batches)) for rank in range(ranks)))
    return _interleaved(ranks, micro_batches, chunks, forwards_first=name == "gpipe")


def schedule_of(plan: Plan, micro_batches: int | None = None) -> Schedule:
    """The schedule of a Plan, for `plan.accumulate` micro-batches unless another number is passed."""
    name: ScheduleName = "zb-h1" if plan.schedule == "zero_bubble" else plan.schedule
    return generate(name, plan.pp, micro_batches or plan.accumulate, plan.virtual)


def _shape_problems(name: str, ranks: int, micro_batches: int, chunks: int) -> Iterator[str]:
    """Every reason why no schedule called `name` has this shape."""
    if name not in SCHEDULE_NAMES:
        yield f"There is no schedule {name!r}.{nearest(name, SCHEDULE_NAMES)} Known: {', '.join(SCHEDULE_NAMES)}."
    elif chunks > 1 and name != "interleaved":
        yield f"The schedule {name} runs one chunk of the model per rank, not {chunks}; use interleaved, or chunks=1."
    for field, count in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            yield f"A schedule's {field} must be a whole number of at least 1, but it is {count!r}."


def _interleaved(ranks: int, micro_batches: int, chunks: int, *, forwards_first: bool) -> Schedule:
    """1F1B over `chunks` model chunks per rank, which divides the bubble by `chunks` (Narayanan et al., SC 2021,
    §2.2.2).

    With one chunk it is 1F1B with a flush (§2.2.1, PipeDream-flush): each backward runs as early as possible, so at
    most min(p − r, m) micro-batches are held. With `forwards_first` too it is GPipe, all forwards and then all
    backwards (Huang et al., NeurIPS 2019; order of the backwards as in torch).

    Micro-batches go through the chunks in groups. The paper needs a multiple of `ranks` micro-batches and
    makes every group `ranks` long. Here the groups are as equal as possible, and none is shorter than `ranks`
    (or than m, if m < ranks). This gives the paper's order for the paper's numbers, and a valid order for all
    others.
    """
    groups = micro_batch_groups(ranks, micro_batches)
    total = micro_batches * chunks
    return Schedule(
        tuple(
            _alternate(
                _chunked(rank, ranks, "F", range(chunks), groups),
                _chunked(rank, ranks, "B", range(chunks - 1, -1, -1), groups),
                total if forwards_first else _warm_up(rank, ranks, chunks, groups[0], total),
            )
            for rank in range(ranks)
        )
    )


def micro_batch_groups(ranks: int, micro_batches: int) -> list[int]:
    """Sizes of the groups that go through the chunks together: ⌊m / p⌋ groups (at least one), the longer first."""
    rounds = max(1, micro_batches // ranks)
    size, longer = divmod(micro_batches, rounds)
    return [size + 1] * longer + [size] * (rounds - longer)


def _warm_up(rank: int, ranks: int, chunks: int, group: int, total: int) -> int:
    """Number of forwards before the first pair of a forward and a backward.

    The last rank needs all but the last chunk of the first group. With several chunks, each earlier rank needs two
    more, because a forward and a backward must each travel one hop further. With one chunk it needs one more, because
    its next forward is always ready.
    """
    hops = ranks - 1 - rank
    return min(total, hops if chunks == 1 else (chunks - 1) * group + 2 * hops)


def _zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """One rank's 1F1B with a split backward, where rank r postpones its weight gradients by r micro-batches.

    The first rank holds as much as under 1F1B, and no rank holds more. The postponed weight gradients fill
    the end of the pipeline. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, §2.2, schedule ZB-H1.
    """
    warm_up = min(micro_batches, ranks - 1 - rank)
    for i in range(warm_up):
        yield Action(rank, "F", i)
    for i in range(micro_batches):
        if i + warm_up < micro_batches:
            yield Action(rank, "F", i + warm_up)
        yield Action(rank, "I", i)
        if i >= rank:
            yield Action(rank, "W", i - rank)
    for i in range(max(0, micro_batches - rank), micro_batches):
        yield Action(rank, "W", i)


def _chunked(rank: int, ranks: int, kind: Kind, chunks: range, groups: list[int]) -> list[Action]:
    """One rank's forwards or backwards: each group of micro-batches through each chunk in turn."""
    actions: list[Action] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        for chunk in chunks:
            stage = rank + chunk * ranks
            actions += [Action(stage, kind, i) for i in group]
        first += size
    return actions


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then alternating forwards and backwards, then the remaining backwards."""
    steady = len(forwards) - warm_up
    pairs = [action for pair in zip(forwards[warm_up:], backwards) for action in pair]
    return (*forwards[:warm_up], *pairs, *backwards[steady:])
