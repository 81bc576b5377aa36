"""The degrees, who shares which sums, which ranks a Plan needs, and which Plans some ranks can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.spawn import spawn
from penstock.checkpoint.coordinator import new_group
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.optim import clip_grad_norm_, grad_norm
from penstock.parallel.dims import ALONE, DATA, LOSS, ParallelDims, fit_to_ranks, require_size, valid_sizes
from penstock.parallel.join import dims_of, joined, launched, local_device

CPU = torch.device("cpu")


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert launched() == 1
    with joined(Plan(), CPU) as dims:
        assert dims is ALONE
        assert dims.main
        assert dims.alone
    with pytest.raises(
        ConfigError, match=r"plan.dp=2 needs 2 processes, and this is one .* --nproc-per-node 2"
    ):
        dims_of(Plan(dp=2), CPU)
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
    fitted = fit_to_ranks(plan, size)
    assert fitted == Plan.parse(expected)
    assert fitted.global_batch == plan.global_batch


def test_a_batch_that_cannot_be_shared_out_is_refused_with_the_sizes_that_can() -> None:
    plan = Plan(micro_batch=4, dp=3)
    assert valid_sizes(plan, up_to=6) == [1, 2, 3, 4, 6]
    with pytest.raises(ConfigError, match=r"12 samples .* over 5 ranks .* It can by 1, 2, 3, 4\."):
        fit_to_ranks(plan, 5)
    with pytest.raises(
        ConfigError, match=r"started 5 processes, but the plan is for 3 .* It can by 1, 2, 3, 4"
    ):
        require_size(plan, 5)
    with pytest.raises(ConfigError, match=r"use plan\.dp=4, with micro_batch=3 accumulate=1"):
        require_size(plan, 4)
    hsdp = Plan(micro_batch=4, dp=4, sharding="hsdp", shard=2)
    assert valid_sizes(hsdp, up_to=8) == [2, 4, 8]


@pytest.mark.parametrize("line", ["gradients=fp32", "dp=2 sharding=fsdp overlap=false"])
def test_what_cannot_run_is_refused_before_processes_are_counted(line: str) -> None:
    plan = Plan.parse(line)
    for ask in (
        lambda: require_size(plan, 1),
        lambda: dims_of(plan, CPU),
        lambda: joined(plan, CPU).__enter__(),
    ):
        with pytest.raises(ConfigError, match="but training cannot run it yet") as caught:
            ask()
        assert "torchrun" not in str(caught.value)


def _joins(line: str, wrong: bool) -> tuple[int, int, tuple[int, ...]] | str:
    plan = Plan.parse(line)
    try:
        with joined(plan, CPU) as dims:
            assert dims.mesh is not None
            assert torch.distributed.is_initialized()
            return dims.rank, dims.size, tuple(dims.mesh.shape)
    except ConfigError as error:
        assert not torch.distributed.is_initialized()
        return str(error)


@pytest.mark.parametrize(("line", "mesh"), [("dp=2", (2, 1)), ("dp=2 sharding=fsdp", (1, 2))])
def test_ranks_join_by_the_launchers_environment(line: str, mesh: tuple[int, ...]) -> None:
    found = spawn(_joins, 2, line, False, group=False)
    assert found == [(0, 2, mesh), (1, 2, mesh)]


def _waits(line: str) -> set[float]:
    with joined(Plan.parse(line), CPU, timeout=77) as dims:
        groups = [torch.distributed.group.WORLD, dims.group("tp"), dims.group(*DATA), new_group()]
        backends: list[Any] = [group._get_backend(CPU) for group in groups if group is not None]
        return {backend.options._timeout.total_seconds() for backend in backends}


def test_every_group_waits_as_long_as_was_asked_for() -> None:
    """torch makes each group but the first with a limit of its own, of 30 minutes."""
    assert spawn(_waits, 4, "dp=2 tp=2", group=False) == [{77.0}] * 4


def test_the_wrong_number_of_ranks_is_refused_before_they_meet() -> None:
    for told in spawn(_joins, 2, "dp=4 micro_batch=8", True, group=False):
        assert "The launcher started 2 processes, but the plan is for 4" in str(told)


def test_ranks_are_numbered_by_place_with_tensor_parallel_ones_as_neighbours() -> None:
    plan = Plan.parse("dp=4 sharding=hsdp shard=4 tp=2 pp=3 cp=2")
    dims = [ParallelDims.of(plan, rank=rank) for rank in range(plan.gpus)]
    assert dims[0].size == plan.gpus == 48
    assert dims[1].place() == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert dims[47].place() == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    assert len({tuple(each.place().values()) for each in dims}) == 48
    # Samples are dealt out to data parallel ranks alone: the others work on the same ones.
    assert dims[0].data_world == 4
    assert [each.data_rank for each in dims[:16]] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [each.data_rank for each in dims[16:32]] == [each.data_rank for each in dims[:16]]


def _groups(lines: list[str]) -> list[list[list[int]]]:
    """The ranks of the loss group, the shard group and the tensor parallel group, by Plan."""
    found = []
    for line in lines:
        plan = Plan.parse(line)
        dims = ParallelDims.of(plan, rank=torch.distributed.get_rank()).connect(CPU)
        groups = [dims.group(*names) for names in (LOSS, ("dp_shard",), ("tp",)) if dims.degree(*names) > 1]
        found.append([torch.distributed.get_process_group_ranks(group) for group in groups])
    return found


def test_groups_hold_the_ranks_that_differ_in_their_dimensions_alone() -> None:
    lines = [
        "dp=4 sharding=fsdp", "dp=2 tp=2", "dp=2 sharding=fsdp pp=2", "dp=2 sharding=fsdp cp=2", "cp=2 tp=2",
    ]  # fmt: skip
    found = spawn(_groups, 4, lines)
    assert found[1] == [
        [[0, 1, 2, 3], [0, 1, 2, 3]], [[1, 3], [0, 1]], [[0, 1], [0, 1]], [[0, 1, 2, 3], [1, 3]],
        [[1, 3], [0, 1]],
    ]  # fmt: skip


def _large_groups(line: str) -> list[list[int]]:
    plan = Plan.parse(line)
    dims = ParallelDims.of(plan, rank=torch.distributed.get_rank()).connect(CPU)
    return [torch.distributed.get_process_group_ranks(dims.group(*names)) for names in (LOSS, ("pp",))]


def test_losses_are_averaged_over_samples_and_tokens_but_not_over_parts_of_the_model() -> None:
    found = spawn(_large_groups, 8, "dp=2 sharding=fsdp cp=2 pp=2")
    assert found[2] == [[0, 1, 2, 3], [2, 6]]
    assert found[6] == [[4, 5, 6, 7], [2, 6]]


def norm_over_two_dimensions() -> tuple[float, float, list[str]]:
    """Norm of the gradients of a model that tensor and data parallelism have both split, and of the same one whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    (model(x) * target).sum().backward()
    whole = clip_grad_norm_(model.parameters(), 1e9).item()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"]).set_force_sum_reduction_for_comms(True)
    (model(x) * target).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    placements = sorted({type(p).__name__ for g in gradients for p in g.placements})  # type: ignore[attr-defined]
    return grad_norm(gradients).item(), whole, placements


def test_the_norm_over_two_dimensions_is_that_of_the_whole_gradients() -> None:
    for norm, whole, placements in spawn(norm_over_two_dimensions, 4):
        assert "_StridedShard" in placements, "the case that this test is about"
        assert norm == pytest.approx(whole, rel=1e-5)
