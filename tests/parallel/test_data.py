"""What replicas and shards say to each other, and when they say nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import TINY, images, micro_batches, whole_weights
from helpers.spawn import spawn
from helpers.watched import Watched
from penstock.build import build
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models import create
from penstock.optim import clip_grad_norm_, grad_norm, make_optimizer, parameter_groups
from penstock.parallel import Sharded, dims_of, shard
from penstock.shards import whole_of

CPU = torch.device("cpu")
CONV = ViTConfig(
    image_size=16, patch_size=16, channels=1, width=16, depth=1, heads=2, mlp_width=16, classes=4, stem="conv"
)  # fmt: skip


def _reductions(line: str) -> Counter[str]:
    """How often each collective ran in one step."""
    plan = Plan.parse(line)
    dims = dims_of(plan, CPU)
    built = build(TINY, plan, recipe=Recipe(clip_norm=None), dims=dims)
    batches = micro_batches(images(0, plan.global_batch), plan, dims.data_rank)
    built.step(batches)
    counts: Counter[str] = Counter()
    with Watched(lambda func, *_: counts.update([func._schema.name] * (func.namespace == "c10d"))):
        built.step(batches)
    return counts


def _counted(lines: list[str]) -> list[Counter[str]]:
    return [_reductions(line) for line in lines]


def test_accumulation_spares_needless_reductions() -> None:
    units = TINY.depth + 1
    names = ("zero1", "zero2", "fsdp", "hsdp shard=1", "ddp")
    zero1, zero2, fsdp, hsdp, ddp = spawn(
        _counted, 2, [f"dp=2 micro_batch=1 accumulate=3 sharding={name}" for name in names]
    )[0]

    def count(said: Counter[str], *words: str) -> int:
        return sum(n for name, n in said.items() if any(word in name for word in words))

    assert count(zero1, "reduce_scatter") == units
    assert count(zero2, "reduce_scatter") == count(fsdp, "reduce_scatter") == 3 * units
    # Weights of zero1 and zero2 stay whole for the step; fsdp gathers blocks twice per micro-batch, the root once.
    assert count(zero1, "gather") == count(zero2, "gather") == units
    assert count(fsdp, "gather") == 3 * (2 * TINY.depth + 1)
    # The number of targets; and all gradients of this model are one bucket, reduced with the last micro-batch only.
    assert count(ddp, "allreduce", "all_reduce") == 1 + 1
    # Between groups, one sum per unit and step.
    assert count(hsdp, "allreduce", "all_reduce") == 1 + units


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp shard=2"])
def test_a_stage_gathers_and_reduces_once_a_step(sharding: str) -> None:
    for one in spawn(_reductions, 4, f"pp=2 dp=2 micro_batch=1 accumulate=3 sharding={sharding}"):
        units = TINY.depth // 2 + 1
        for word in ("gather", "reduce_scatter"):
            assert sum(n for name, n in one.items() if word in name) == units


def _overflowed(line: str) -> tuple[bool, list[float], float]:
    plan = Plan.parse(line)
    dims = dims_of(plan, CPU)
    built = build(TINY, plan, dims=dims)
    assert built.scaler is not None
    pictures, classes = images(0, plan.global_batch)
    classes = classes.clamp(min=0)  # few targets have large gradients, which would overflow by themselves
    (picture, target), *more = micro_batches((pictures, classes), plan, dims.rank)
    built.step([(picture, target), *more])
    before, scale = whole_weights(built), float(built.scaler.scale)
    bad = picture.clone()
    if dims.rank == 1:
        bad[0, 0, 0, 0] = float("inf")
    built.step([(bad, target), *more])
    after = whole_weights(built)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    scales = [scale, float(built.scaler.scale), float(built.scaler.overflows)]
    built.step([(picture, target), *more])
    moved = max(float((value - after[name]).abs().max()) for name, value in whole_weights(built).items())
    return same, scales, moved


def _overflows(lines: list[str]) -> list[tuple[bool, list[float], float]]:
    return [_overflowed(line) for line in lines]


def test_an_overflow_on_one_rank_is_skipped_on_all() -> None:
    half = "dp=2 micro_batch=2 dtype=fp16"
    lines = [
        f"{half} precision=O1 optimizer=fused",
        f"{half} precision=O2 optimizer=contiguous accumulate=2",
        f"{half} precision=O1 optimizer=fused sharding=fsdp",
        f"{half} precision=O2 optimizer=contiguous sharding=fsdp accumulate=2",
        f"{half} precision=O2 optimizer=fused sharding=zero1",
        f"{half} precision=O1 optimizer=contiguous sharding=hsdp shard=1 accumulate=2",
        f"{half} precision=O2 optimizer=fused sharding=hsdp shard=2",
    ]
    first, second = spawn(_overflows, 2, lines)
    assert [entry[:2] for entry in first] == [entry[:2] for entry in second]
    for line, (same, scales, moved) in zip(lines, first):
        assert same, f"{line}: weights changed in the skipped step"
        assert scales == [2.0**16, 2.0**15, 1.0], line
        assert moved > 0, f"{line}: the step after it was not taken"


def _statistics() -> list[dict[str, Tensor]]:
    plan = Plan(dp=2, micro_batch=2)
    dims = dims_of(plan, CPU)
    built = build(CONV, plan, dims=dims)
    generator = torch.Generator().manual_seed(dims.rank)
    built.step([(torch.randn(2, 1, 16, 16, generator=generator), torch.tensor([0, 1]))])
    return [{k: v for k, v in built.model.state_dict().items() if "running" in k}]


def test_batch_norms_have_the_same_statistics_on_all_ranks() -> None:
    (first,), (second,) = spawn(_statistics, 2)
    assert first
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not torch.equal(value, torch.zeros_like(value)), name


def _norms() -> tuple[float, float, float]:
    torch.manual_seed(0)
    whole, cut = create(TINY), create(TINY)
    cut.load_state_dict(whole.state_dict())
    plan = Plan(dp=2, micro_batch=2, sharding="fsdp")
    dims = dims_of(plan, CPU)
    replicas = shard(cut, plan, dims, CPU)
    batch = images(0, 2)
    for model in (whole, cut):
        if model is cut:
            replicas.begin(0, 1)
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    expected = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    got = float(clip_grad_norm_(cut.parameters(), 0.1))
    return expected, got, float(grad_norm([p.grad for p in cut.parameters()]))


def test_gradients_are_clipped_by_their_norm_over_all_shards() -> None:
    for expected, got, after in spawn(_norms, 2):
        assert got == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.1, rel=1e-4)


def _rebound(form: str) -> float:
    """An optimizer made, and stepped, before its model is sharded; against one that never was."""
    plan = Plan(dp=2, micro_batch=2, sharding="fsdp")
    dims = dims_of(plan, CPU)
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = create(TINY)
        models.append(model)
        optimizers.append(make_optimizer(parameter_groups(model, weight_decay=0.1), form, lr=1e-3, eps=1e-6))
    replicas = None
    for step in range(4):
        if step == 2:
            replicas = shard(models[1], plan, dims, CPU, optimizers=[optimizers[1]])
        for model, optimizer in zip(models, optimizers):
            pictures, targets = images(step, 2)
            if model is models[1] and replicas is not None:
                replicas.begin(0, 1)
            nn.functional.cross_entropy(model(pictures), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(replicas, Sharded)
    names = [name for group in optimizers[1].param_groups for name in group["param_names"]]
    held = [p for group in optimizers[1].param_groups for p in group["params"]]
    now = dict(models[1].named_parameters())
    assert all(now[name] is parameter for name, parameter in zip(names, held))
    assert all("exp_avg" in optimizers[1].state[p] for p in held)
    whole = {name: whole_of(p) for name, p in now.items()}
    return max(float((p - whole[name]).abs().max()) for name, p in models[0].named_parameters())


def _rebounds(forms: list[str]) -> list[float]:
    return [_rebound(form) for form in forms]


def test_an_optimizer_made_before_sharding_goes_on_over_the_shards() -> None:
    for differences in spawn(_rebounds, 2, ["loop", "foreach", "fused", "contiguous"]):
        assert all(difference < 1e-6 for difference in differences), differences


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))


def _refused() -> list[str]:
    plan = Plan(dp=2, sharding="fsdp")
    dims = dims_of(plan, CPU)
    told = []
    for model in (Scalar(), nn.Linear(4, 4)):
        try:
            shard(model, plan, dims, CPU)
        except ConfigError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    scalar, blocks = spawn(_refused, 2)[0]
    assert "The parameter scale of Scalar is a single number" in scalar
    assert "No repeated blocks were found" in blocks
    assert "anatomy.enrol" in blocks
