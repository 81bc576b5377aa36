"""A model that no rank could hold is made, and its weights are those that one process would have drawn."""

from __future__ import annotations

import gc
import importlib
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from helpers.spawn import spawn
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.models import create
from penstock.parallel import dims_of, shard, sharded_init
from penstock.parallel.sharded_init import Drawing, drawing_of, make, shares

MODEL = ViTConfig(
    image_size=32, patch_size=4, channels=3, width=96, depth=2, heads=2, mlp_width=130, classes=10, drop_path=0.1
)  # fmt: skip


class Awkward(nn.Module):
    """Draws in every way that a single rank's rows could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 101) for _ in range(2))
        self.table = nn.Embedding(103, 64, padding_idx=3)
        self.scaled = nn.Parameter(torch.empty(90, 64))
        self.viewed = nn.Parameter(torch.empty(64 * 66).view(66, 64))
        self.truncated = nn.Parameter(torch.empty(70, 70))
        self.turned = nn.Parameter(torch.empty(70, 80))
        self.never = nn.Parameter(torch.empty(65, 64))
        with torch.no_grad():
            nn.init.normal_(self.scaled).mul_(0.3)[7:9].fill_(2.0)
            self.viewed.uniform_()
            nn.init.trunc_normal_(self.truncated, std=0.02)
            nn.init.orthogonal_(self.turned)
            self.never.zero_()
            for layer in self.layers:  # each is drawn a second time, after others were worked on
                layer.weight.data.normal_(std=0.02)
                layer.weight.data[:, 5].zero_()
            self.layers[0].weight.add_(self.layers[1].weight, alpha=0.5)
            self.layers[0].weight.copy_(self.layers[0].weight.clone() * 3)


def _transformers(name: str) -> nn.Module:
    import transformers as hf

    small = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 130}
    if name == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8))
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=96, n_layer=2, n_head=2, vocab_size=301, n_positions=64)
        )
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, vocab_size=301))
    return hf.BertForSequenceClassification(hf.BertConfig(**small, vocab_size=301))


def factories() -> dict[str, Callable[[], nn.Module]]:
    own = {"penstock": partial(create, MODEL), "awkward": Awkward}
    return own | {name: partial(_transformers, name) for name in ("vit", "gpt2", "llama", "bert")}


def _made(names: list[str]) -> dict[str, int]:
    """How many parameters of each model were made without memory; all are held to those of one process."""
    sharded_init._ROOM = 100_000  # so that whole tensors must go while others are worked on
    rank, world = distributed.get_rank(), distributed.get_world_size()
    counts = {}
    for name in names:
        factory = factories()[name]
        torch.manual_seed(3)
        expected = dict(factory().named_parameters())
        after = torch.get_rng_state()
        torch.manual_seed(3)
        drawing = Drawing(rank, world)
        model = make(factory, drawing)
        assert torch.equal(after, torch.get_rng_state()), name
        rows = dict(shares(model, drawing))
        counts[name] = len(rows)
        for key, parameter in model.named_parameters():
            nothing = [expected[key][:0]] * world  # for ranks beyond the rows there are
            mine = [*expected[key].chunk(world), *nothing][rank]
            assert parameter.is_meta == (key in rows)
            torch.testing.assert_close(
                rows.get(key, parameter), mine if key in rows else expected[key], rtol=0, atol=0
            )
    return counts


@pytest.mark.parametrize(
    "names",
    [["penstock", "awkward"], pytest.param(["vit", "gpt2", "llama", "bert"], marks=pytest.mark.slow)],
    ids=["own", "hf"],
)
def test_each_rank_keeps_its_rows_of_what_one_process_would_draw(names: list[str]) -> None:
    if "vit" in names:
        pytest.importorskip("transformers")
    for counts in spawn(_made, 3, names):
        assert all(count >= 5 for count in counts.values()), counts


class Wide(nn.Module):
    """320 MB of weights in 20 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2000, 2000) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


ROOM_FOR = 200_000_000
"""Bytes beyond those of the process: less than the model, more than a rank's quarter, the whole weights that stand
beside it while it is made."""


def _limited() -> tuple[bool, float, int]:
    plan = Plan(dp=4, sharding="fsdp")
    dims = dims_of(plan, "cpu")
    importlib.import_module("torch._dynamo")  # FSDP looks at it in the first forward pass
    used = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM_FOR, resource.RLIM_INFINITY))
    refused = False
    try:
        Wide()
    except (RuntimeError, MemoryError):
        refused = True
    gc.collect()
    torch.manual_seed(1)
    drawing = drawing_of(dims)
    model = make(Wide, drawing)
    rows = dict(shares(model, drawing))
    del drawing
    shard(model, plan, dims, torch.device("cpu"), shares=rows)
    del rows
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    with torch.no_grad():
        output = model(torch.ones(1, 2000))
    return refused, float(output.double().sum()), held


@pytest.mark.slow
def test_a_model_larger_than_a_ranks_memory_is_made() -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        expected = float(Wide()(torch.ones(1, 2000)).double().sum())
    for refused, got, held in spawn(_limited, 4):
        assert refused, "the limit did not hold"
        assert got == pytest.approx(expected, rel=1e-5)
        assert held <= 320_160_000 / 4 + 8000


class EmptyBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.empty(100, 100))


def test_a_large_empty_buffer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"The buffer mask of EmptyBuffer was made with torch\.empty"):
        make(EmptyBuffer, Drawing(0, 1))
