"""Layouts of thousands of ranks, of which single ones are built here: no tensor has memory and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn

from helpers.sweeps import sweep
from penstock.config.model import preset
from penstock.config.plan import Plan
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.optim.tensors import local
from penstock.parallel import ParallelDims, parts, recompute_blocks, sequence, shard
from penstock.parallel.pipeline import cut_stages
from penstock.parallel.tensor import split_layers
from penstock.planner.describe import describe, totals
from penstock.planner.memory import pass_bytes
from penstock.planner.pipeline import stage_counts
from penstock.planner.states import device_share

pytestmark = pytest.mark.slow

META = torch.device("meta")
COMMON = "micro_batch=1 recompute=selective attention=plain precision=O3"
LAYOUTS = {
    # Narayanan et al., SC 2021, table 1: the layout of its model of 1 T on 3,072 GPUs; tokens split besides.
    "gpt-1t": (f"tp=8 sp=true pp=64 dp=6 accumulate=512 {COMMON}", 3072),
    # Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 4: 405B on 16,384 GPUs.
    "llama3-405b": (f"tp=8 sp=true pp=16 dp=128 sharding=zero1 accumulate=16 {COMMON}", 16384),
}


@contextmanager
def _as_rank(rank: int, size: int) -> Iterator[None]:
    """One of many ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Found(NamedTuple):
    """What a rank holds."""

    weights: int
    rows: int
    """Of the weights, what the rank updates."""
    kept: int
    """Bytes that autograd keeps of one micro-batch."""


class _Rows(dict[str, Tensor]):
    """This rank's rows of every parameter, without values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __bool__(self) -> bool:
        return True

    def get(self, name: str, _: Any = None) -> Tensor:
        return torch.empty_like(local(dict(self.model.named_parameters())[name].detach()), device=META)


class _Kept:
    """Counts what autograd keeps, each storage once, weights left out."""

    def __init__(self, weights: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = weights
        self.seen: dict[int, tuple[int, Tensor]] = {}
        pack = sequence._GatheredAgain.pack

        def inner(again: Any, tensor: Tensor) -> Any:
            packed = pack(again, tensor)
            self.add(packed if isinstance(packed, Tensor) else again.own_tokens)
            return packed

        monkeypatch.setattr(sequence._GatheredAgain, "pack", inner)

    def add(self, kept: Tensor) -> Tensor:
        storage = kept.untyped_storage()
        if storage._cdata not in self.weights:
            self.seen[storage._cdata] = storage.nbytes(), kept
        return kept


def _built(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> Found:
    plan, config = Plan.parse(LAYOUTS[name][0]), preset(name)
    dims = ParallelDims.of(plan, rank=rank).connect(torch.device("cpu"))
    with META:
        model = create(config).to(torch.bfloat16)
    split_layers(model, plan, dims, alike=True)
    stages = cut_stages(model, stage_counts(totals(config), plan.pp), dims, META, fixed=True)
    set_switch(model, "attention", plan.attention)
    recompute_blocks(model, plan, config, META)
    stages.attach()
    weights = sum(local(p.detach()).numel() for p in model.parameters())

    (stage,) = stages.local_stages
    tokens = torch.zeros(1, config.sequence, dtype=torch.int64, device=META)
    received: tuple[Tensor, ...] = ()
    if stage:
        shapes = stages.expected(stage, (tokens,))
        received = tuple(
            torch.empty(s, device=META, dtype=torch.bfloat16, requires_grad=True) for s in shapes
        )
    kept = _Kept({local(p.detach()).untyped_storage()._cdata for p in model.parameters()}, monkeypatch)
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        stages.run(stage, received, lambda: model(tokens, targets=tokens))
    found = sum(size for size, _ in kept.seen.values())
    if plan.sharding != "ddp":
        shard(model, plan, dims, META, shares=_Rows(model))
    rows = sum(local(p.detach()).numel() for p in model.parameters())
    return Found(weights, rows, found)


@pytest.mark.parametrize("name", sweep(LAYOUTS, ["llama3-405b"]))
def test_what_a_rank_holds_is_what_the_planner_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, size = LAYOUTS[name]
    plan, config = Plan.parse(line), preset(name)
    assert plan.gpus == size
    work = describe(config, plan, "cpu")  # whose operators are those that run without a device's own kernels
    counts, share, one = (
        stage_counts(totals(config), plan.pp),
        device_share(work, plan),
        pass_bytes(work, plan),
    )
    full = []
    for place in (0, plan.pp // 2, plan.pp - 1):
        rank = place * (size // plan.pp) + 5
        with _as_rank(rank, size), monkeypatch.context() as patch:
            # Asks for autocast, which the meta device has not.
            patch.setattr(parts, "_in_product_type", lambda x: x)
            found = _built(name, rank, patch)
        kept = counts[place] * one.blocks / work.depth + one.entrance * (place == 0)
        if place == plan.pp - 1:
            # The loss keeps 4 bytes of a logit here, and in other software up to twice that.
            assert kept < found.kept < kept + one.exit
        else:
            assert found.kept == pytest.approx(kept, rel=0.001)
        # A stage between the ends has blocks alone.
        assert place in (0, plan.pp - 1) or found.weights == counts[place] * work.blocks[0].parameters
        full.append(found)
    assert max(rank.weights for rank in full) == share.parameters
    assert max(rank.rows for rank in full) == share.updated
