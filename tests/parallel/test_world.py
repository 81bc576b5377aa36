"""Which ranks a Plan needs, and which Plans some ranks can run."""

from __future__ import annotations

import pytest
import torch

from helpers.spawn import spawn
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.parallel.world import (
    ALONE,
    fit_to_world,
    joined,
    launched,
    local_device,
    require_size,
    valid_sizes,
    world_of,
)

CPU = torch.device("cpu")


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert launched() == 1
    with joined(Plan(), CPU) as world:
        assert world is ALONE
        assert world.main
        assert world.alone
    with pytest.raises(
        ConfigError, match=r"plan.dp=2 needs 2 processes, and this is one .* --nproc-per-node 2"
    ):
        world_of(Plan(dp=2), CPU)
    assert local_device(torch.device("cuda")) == torch.device("cuda")


@pytest.mark.parametrize(
    ("line", "size", "expected"),
    [
        ("micro_batch=8 dp=4", 2, "micro_batch=8 accumulate=2 dp=2"),
        ("micro_batch=8 dp=4", 8, "micro_batch=4 dp=8"),
        ("micro_batch=6 accumulate=2 dp=2", 3, "micro_batch=4 accumulate=2 dp=3"),
        ("micro_batch=6 dp=4", 1, "micro_batch=6 accumulate=4"),
    ],
)
def test_another_number_of_ranks_keeps_the_batch(line: str, size: int, expected: str) -> None:
    plan = Plan.parse(line)
    fitted = fit_to_world(plan, size)
    assert fitted == Plan.parse(expected)
    assert fitted.global_batch == plan.global_batch


def test_a_batch_that_cannot_be_shared_out_is_refused_with_the_sizes_that_can() -> None:
    plan = Plan(micro_batch=4, dp=3)
    assert valid_sizes(plan, up_to=6) == [1, 2, 3, 4, 6]
    with pytest.raises(ConfigError, match=r"12 samples .* by 5 ranks .* It can by 1, 2, 3, 4\."):
        fit_to_world(plan, 5)
    with pytest.raises(
        ConfigError, match=r"started 5 processes, but the plan is for 3 .* It can by 1, 2, 3, 4"
    ):
        require_size(plan, 5)
    with pytest.raises(ConfigError, match=r"use plan\.dp=4, with micro_batch=3 accumulate=1"):
        require_size(plan, 4)
    hsdp = Plan(micro_batch=4, dp=4, sharding="hsdp", shard=2)
    assert valid_sizes(hsdp, up_to=8) == [2, 4, 8]


@pytest.mark.parametrize("line", ["tp=2", "pp=2 schedule=gpipe", "dp=2 ep=2"])
def test_what_cannot_run_is_refused_before_processes_are_counted(line: str) -> None:
    plan = Plan.parse(line)
    for ask in (
        lambda: require_size(plan, 1),
        lambda: world_of(plan, CPU),
        lambda: joined(plan, CPU).__enter__(),
    ):
        with pytest.raises(ConfigError, match="but training cannot run it yet") as caught:
            ask()
        assert "torchrun" not in str(caught.value)


def _joins(line: str, wrong: bool) -> tuple[int, int, tuple[int, ...]] | str:
    plan = Plan.parse(line)
    try:
        with joined(plan, CPU) as world:
            assert world.mesh is not None
            assert torch.distributed.is_initialized()
            return world.rank, world.size, tuple(world.mesh.shape)
    except ConfigError as error:
        assert not torch.distributed.is_initialized()
        return str(error)


@pytest.mark.parametrize(("line", "mesh"), [("dp=2", (2, 1)), ("dp=2 sharding=fsdp", (1, 2))])
def test_ranks_join_by_the_launchers_environment(line: str, mesh: tuple[int, ...]) -> None:
    found = spawn(_joins, 2, line, False, group=False)
    assert found == [(0, 2, mesh), (1, 2, mesh)]


def test_the_wrong_number_of_ranks_is_refused_before_they_meet() -> None:
    for told in spawn(_joins, 2, "dp=4 micro_batch=8", True, group=False):
        assert "The launcher started 2 processes, but the plan is for 4" in str(told)
