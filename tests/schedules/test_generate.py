"""The generated orders are the published ones; torch's own generators are the independent witness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import SCHEDULE_NAMES, Action, Schedule, generate, validate
from penstock.schedules.generate import micro_batch_groups

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def from_torch(ranks: dict[int, list[Any]]) -> Schedule:
    """torch's table of actions without idle slots and without the gradient reduction it adds."""
    return Schedule(
        tuple(
            tuple(Action.parse(str(a)) for a in ranks[r] if a is not None and "REDUCE_GRAD" not in str(a))
            for r in sorted(ranks)
        )
    )


def as_torch_runs(cls: Any, ranks: int, micro_batches: int) -> Schedule:
    """The order in which the step of `cls` calls its stage, rank by rank, with a stage that only notes the calls.

    The step itself is asked, not `pipeline_order`: of 1F1B that table counts the last rank's forwards from 1.
    """
    orders = []
    for rank in range(ranks):
        order: list[Action] = []
        stage = SimpleNamespace(
            stage_index=rank,
            forward_one_chunk=lambda i, *_, to=order, r=rank, **__: to.append(Action(r, "F", i)),
            backward_one_chunk=lambda i, to=order, r=rank, **_: to.append(Action(r, "B", i)),
            perform_reduce_grad=lambda _: None,
            **{f"get_{way}_{end}_ops": lambda _: [] for way in ("fwd", "bwd") for end in ("send", "recv")},
        )
        schedule = SimpleNamespace(
            _stage=stage,
            _num_stages=ranks,
            _n_microbatches=micro_batches,
            scale_grads=True,
            _has_backward=True,
            _check_inputs=lambda *_: ([()] * micro_batches, [{}] * micro_batches),
            **{
                name: lambda *_: None
                for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
            },
        )
        cls._step_microbatches(schedule)
        orders.append(tuple(order))
    return Schedule(tuple(orders))


def torch_multi(cls: Any, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    rounds = max(1, micro_batches // ranks)
    assert micro_batches % rounds == 0, "torch refuses this number of micro-batches"
    counts = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    return from_torch({r: cls._calculate_single_rank_operations(counts, r) for r in range(ranks)})


@pytest.mark.parametrize("ranks", range(1, 9))
def test_gpipe_is_torchs(ranks: int) -> None:
    for micro_batches in range(1, 20):
        expected = as_torch_runs(torch_schedules.ScheduleGPipe, ranks, micro_batches)
        assert generate("gpipe", ranks, micro_batches) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
def test_1f1b_is_torchs(ranks: int) -> None:
    for micro_batches in range(1, 24):
        expected = as_torch_runs(torch_schedules.Schedule1F1B, ranks, micro_batches)
        assert generate("1f1b", ranks, micro_batches) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_is_torchs_wherever_torch_has_one(ranks: int, chunks: int) -> None:
    compared = 0
    for micro_batches in range(1, 33):
        if micro_batches % max(1, micro_batches // ranks) == 0:
            expected = torch_multi(torch_schedules.ScheduleInterleaved1F1B, ranks, micro_batches, chunks)
            assert generate("interleaved", ranks, micro_batches, chunks) == expected
            compared += 1
    assert compared >= 32 // ranks  # at least the multiples of p, which are the paper's


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zb_h1_is_torchs_zero_bubble_with_one_stage_per_rank(ranks: int) -> None:
    for micro_batches in range(1, 24):
        if micro_batches % max(1, micro_batches // ranks) == 0:
            expected = torch_multi(torch_schedules.ScheduleInterleavedZeroBubble, ranks, micro_batches, 1)
            assert generate("zb-h1", ranks, micro_batches) == expected


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 7), st.integers(1, 30), st.integers(1, 4))
def test_every_shape_gives_a_schedule_that_can_be_run(
    name: Any, ranks: int, micro_batches: int, chunks: int
) -> None:
    chunks = chunks if name == "interleaved" else 1
    schedule = generate(name, ranks, micro_batches, chunks)
    validate(schedule)
    assert (len(schedule.ranks), schedule.stages, schedule.micro_batches) == (
        ranks,
        ranks * chunks,
        micro_batches,
    )
    assert schedule.placement == tuple(stage % ranks for stage in range(ranks * chunks))
    assert {kind for order in schedule.ranks for _, kind, _ in order} == (
        {"F", "I", "W"} if name == "zb-h1" else {"F", "B"}
    )


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 200))
def test_groups_are_even_and_not_shorter_than_the_pipeline(ranks: int, micro_batches: int) -> None:
    groups = micro_batch_groups(ranks, micro_batches)
    assert sum(groups) == micro_batches
    assert max(groups) - min(groups) <= 1
    assert min(groups) >= min(ranks, micro_batches)
    if micro_batches % ranks == 0:
        assert set(groups) == {ranks}


def test_what_cannot_be_is_refused_with_every_reason() -> None:
    with pytest.raises(ConfigError) as error:
        generate("1f1b", 0, -1, 2)
    assert len(error.value.problems) == 3
    assert "runs one chunk of the model per rank, not 2; use interleaved" in error.value.problems[0]
    assert "ranks must be a whole number of at least 1, but it is 0" in error.value.problems[1]
    assert "micro_batches must be" in error.value.problems[2]
    with pytest.raises(ConfigError, match=r"no schedule '1fib'\. Did you mean '1f1b'\?"):
        generate("1fib", 2, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"it is 2\.0"):
        generate("gpipe", 2, 2.0)  # type: ignore[arg-type]
