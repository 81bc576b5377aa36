"""Bytes that autograd keeps of one block, at the sizes of the 22B to 1T models, against Table 2 of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022). Nothing is computed: tensors are on the meta
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.model import DecoderConfig, preset
from penstock.config.plan import Plan
from penstock.models.block import Block
from penstock.models.sublayers import Attention
from penstock.parallel.recompute import _Recomputed
from penstock.planner.describe import describe
from penstock.planner.recompute import Recompute, kept_by

SAMPLES = 4
# Width and heads of their Table 3; sequences of 2048. Each layer is split over 8 devices.
SHAPES = {"gpt-22b": (6144, 64), "gpt-175b": (12288, 96), "gpt-530b": (20480, 128), "gpt-1t": (25600, 160)}
TOKENS, SPLIT = 2048, 8
# Table 2 in units of sbh bytes, for tensor parallel degree t and A = 5as/h.
TABLE: dict[str, Callable[[int, float], float]] = {
    "none": lambda t, A: 10 + 24 / t + A / t,
    "selective": lambda t, A: 10 + 24 / t,
    "full": lambda t, A: 2,
}


def _one_byte_masks(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as a GPU's kernel does it: it keeps a mask of a byte for each number."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _kept(name: str, t: int, how: str) -> float:
    """Bytes over sbh of a block in their form: all scores in memory, dropout after them and after both branches, and of
    what tensor parallelism splits one device's share."""
    width, heads = SHAPES[name]
    config = preset(name)
    assert isinstance(config, DecoderConfig)
    mine: Any = replace(
        config, heads=heads // t, head_features=width // heads, mlp_width=4 * width // t, dropout=0.1
    )
    assert mine.width == width
    # Without the causal mask, by which our own form on a CPU leaves scores out.
    block = Block(mine, mine.layers[0], device="meta", dtype=torch.bfloat16)
    attention = block.attention
    assert isinstance(attention, Attention)
    attention.backend, attention.scores_again = "plain", how == "selective"
    if how == "full":
        block.forward = _Recomputed(block.forward, "full")  # type: ignore[method-assign]
    x = torch.empty(SAMPLES, TOKENS, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(size for size, _ in seen.values()) / (SAMPLES * TOKENS * width)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("how", TABLE)
def test_a_block_keeps_what_table_2_says(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "dropout", _one_byte_masks)
    width, heads = SHAPES[name]
    for t in (1, SPLIT):
        kept = _kept(name, t, how)
        assert kept == pytest.approx(TABLE[how](t, 5 * heads * TOKENS / width), rel=0.02), t


@pytest.mark.parametrize(("name", "share"), [("gpt-175b", 0.185), ("gpt-530b", 0.202)])
def test_selective_recomputation_with_split_tokens_keeps_a_fifth(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators of the planner, whose form without split tokens is the measured one."""
    monkeypatch.setattr(torch.nn.functional, "dropout", _one_byte_masks)
    config = preset(name)

    def said(how: str, **changes: Any) -> float:
        plan = Plan(
            precision="O3", attention="plain", compile="blocks", micro_batch=SAMPLES, tp=SPLIT, **changes
        )
        part = describe(config, plan).blocks[0]
        return sum(kept_by(part, Recompute(how)).values()) / (SAMPLES * TOKENS * SHAPES[name][0])

    before = _kept(name, SPLIT, "none")
    assert said("none") == pytest.approx(before, rel=0.01)
    assert said("selective") == pytest.approx(_kept(name, SPLIT, "selective"), rel=0.01)
    assert said("selective", sp=True) / before == pytest.approx(share, rel=0.02)
