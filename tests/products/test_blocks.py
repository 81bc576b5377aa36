"""Which blocks are computed in one call, and when they go back to their modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.compress.data import QuantiseData
from penstock.compress.quantise import candidates, quantise_folder
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.data.text.tokenizers import Bytes
from penstock.export.export import inputs_of
from penstock.infer.encode import Embedder
from penstock.infer.load import loaded
from penstock.kernels.native_blocks import computes_blocks
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.models.block import Block
from penstock.models.convert import save_pretrained
from penstock.models.model import Model
from penstock.models.rounded import round_rows
from penstock.models.wrap import arounds, find, take_off
from penstock.planner.operators import blocks_of
from penstock.planner.terms import in_one_call
from penstock.products import convert
from penstock.products.blocks import OneCall, join_blocks
from penstock.products.rounded import store_rounded

pytestmark = pytest.mark.skipif(
    not computes_blocks(), reason="the kernel is made of instructions of AVX512-VNNI, by a C++ compiler"
)
VIT: Any = replace(PRESETS["vit-digits"], width=32, depth=3, heads=2, mlp_width=64)
BERT: Any = replace(
    PRESETS["bert-tiny"], width=32, heads=2, mlp_width=64, vocabulary=Bytes.size, head="none", classes=3
)
IMAGES = torch.rand(
    5, VIT.channels, VIT.image_size, VIT.image_size, generator=torch.Generator().manual_seed(0)
)


def _quantised(config: Any, inputs: torch.Tensor, folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    save_pretrained(create(config), folder / "whole")
    wanted = QuantiseOptions(format="int8", inputs="static", limit="absmax", **options)
    quantise_folder(folder / "whole", folder / "small", wanted, QuantiseData(lambda: [(inputs,)]))
    return folder / "small"


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Blocks that were computed by their modules."""
    apart: list[Block] = []
    compute = Block.forward

    def counted(self: Block, *given: Any) -> Any:
        apart.append(self)
        return compute(self, *given)

    monkeypatch.setattr(Block, "forward", counted)
    return apart


def test_an_opened_model_computes_blocks_in_one_call_each(tmp_path: Path, calls: list[Block]) -> None:
    folder = _quantised(VIT, IMAGES, tmp_path)
    model = loaded(folder, Plan(), weights="auto", tokenizer=None).model
    assert all(find(block, OneCall) for block in _blocks(model))
    calls.clear()  # of calibration
    with torch.inference_mode():
        whole = model(IMAGES)
        assert not calls
        apart = loaded(folder, Plan.parse("attention=math"), weights="auto", tokenizer=None).model(IMAGES)
    assert len(calls) == VIT.depth
    torch.testing.assert_close(whole, apart, rtol=0.0, atol=0.05 * float(apart.std()))
    plain = loaded(folder, Plan(), weights="plain", tokenizer=None).model
    assert not any(map(arounds, _blocks(plain)))


def test_layers_that_stayed_as_they_were_keep_their_block_apart(tmp_path: Path) -> None:
    model = loaded(_quantised(VIT, IMAGES, tmp_path), Plan(), weights="auto", tokenizer=None).model
    blocks = _blocks(model)
    blocks[0].mlp.up = nn.Linear(32, 64)  # type: ignore[union-attr]
    blocks[1].attention.causal = True
    for block in blocks:
        take_off(block, arounds(block)[0])
    assert join_blocks(model) == 1
    assert [find(block, OneCall) is not None for block in blocks] == [False, False, True]


def test_blocks_go_back_to_their_modules(tmp_path: Path, calls: list[Block]) -> None:
    model = loaded(_quantised(VIT, IMAGES, tmp_path), Plan(), weights="auto", tokenizer=None).model
    calls.clear()  # of calibration
    with torch.no_grad():
        whole = model(IMAGES)
        assert not calls
        seen: list[Any] = []
        handle = _blocks(model)[1].mlp.register_forward_hook(lambda *given: seen.append(given))
        model(IMAGES)
        assert calls == _blocks(model)[1:2]
        assert len(seen) == 1
        handle.remove()
        calls.clear()
        other = nn.Linear(64, 32)
        _blocks(model)[2].mlp.down = other  # type: ignore[union-attr]
        changed = model(IMAGES)
        assert calls == _blocks(model)[2:]
        assert not torch.allclose(changed, whole)
        calls.clear()
        model.train()(IMAGES)
        assert len(calls) == VIT.depth
        model.eval()
    calls.clear()
    model(IMAGES)  # in which gradients may be asked for
    assert len(calls) == VIT.depth


def test_texts_need_no_mask_in_one_call(tmp_path: Path, calls: list[Block]) -> None:
    folder = _quantised(BERT, torch.randint(0, 250, (4, 60)), tmp_path)
    made = Embedder(folder, tokenizer=Bytes(), batch=8)
    lengths = (40, 90, 90, 126)
    rows = [torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            for length in lengths]  # fmt: skip
    calls.clear()  # of calibration
    together = made.embed(rows)
    alone = torch.cat([made.embed([row]) for row in rows])
    assert not calls
    assert torch.equal(alone, together)
    with torch.inference_mode():
        made.model(torch.tensor([rows[0]]), torch.tensor([30]))
    assert len(calls) == len(_blocks(made.model))  # under a mask


def test_vectors_by_weights_in_int8_are_those_of_one_call_a_block(
    calls: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features of other sizes behind norms, which dividing them by their sizes makes alike."""
    torch.manual_seed(0)
    model = create(BERT).eval()
    with torch.no_grad():
        *norms, _ = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        for norm in norms:
            norm.weight[::16] *= 40
        for linear in candidates(model, "int8")[0].values():
            nn.init.normal_(linear.weight, std=0.3)
    rows = torch.randint(0, 250, (16, 60)).tolist()
    exact = Embedder(copy.deepcopy(model), weights="plain", tokenizer=Bytes()).embed(rows)
    calls.clear()
    off = {}
    for careful in (True, False):
        if not careful:
            monkeypatch.setattr(convert, "_factors", lambda model, names: dict.fromkeys(names))
        made = Embedder(copy.deepcopy(model), weights="int8", tokenizer=Bytes())
        calls.clear()  # of measuring features
        off[careful] = float(1 - (made.embed(rows) * exact).sum(1).min())
        assert not calls
    assert 0 < off[True] < 0.5 * off[False]


def _joined(config: Any) -> Model:
    """A model whose linear layers of blocks are in int8, in as few calls as can be."""
    torch.manual_seed(0)
    model = create(config).eval().requires_grad_(False)
    linears = {name: one for name, one in candidates(model, "int8")[0].items() if isinstance(one, nn.Linear)}
    store_rounded(model, {name: ("int8", round_rows(one.weight)) for name, one in linears.items()})
    join_blocks(model)
    set_switch(model, "attention", "auto")
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_weights_of_their_own(
    calls: list[Block], copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = _joined(VIT)
    with torch.inference_mode():
        expected, other = model(IMAGES), copied(model)
        assert torch.equal(other(IMAGES), expected)
        for block in _blocks(model):
            block.norm1.weight.zero_()  # type: ignore[union-attr,operator]
        assert torch.equal(other(IMAGES), expected)
        assert not torch.equal(model(IMAGES), expected)
    assert not calls, "copies are computed in one call, too"


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith(("-tiny", "-digits"))])
def test_the_planner_knows_which_blocks_are_computed_in_one_call(name: str, calls: list[Block]) -> None:
    config = PRESETS[name]
    model = _joined(config)
    lengths = model.graph.lengths
    inputs = inputs_of(model, 2, lengths[0], lengths[-1])
    inputs.pop("lengths", None)
    if model.graph.routed:
        inputs["routes"] = torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode():
        model(**inputs)
    expected = sum(kind.count for kind in blocks_of(config) if in_one_call(kind))
    assert len(_blocks(model)) - len(set(calls)) == expected
