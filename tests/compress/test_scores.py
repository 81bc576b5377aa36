"""Scores say what they claim, and what does nothing is removed first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches, loss, small
from penstock.compress.cut import cuts, sized
from penstock.compress.prune import keep_layers
from penstock.compress.scores import expert_scores, layers_to_keep, mean_loss, part_scores
from penstock.config.compress import Criterion, Prune
from penstock.config.model import ModelConfig
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.model import Model

BATCHES = 3


def _model(config: ModelConfig) -> Model:
    torch.manual_seed(2)
    model = create(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _data(config: ModelConfig) -> list[tuple[Tensor, ...]]:
    return [batches(config, step, 4) for step in range(BATCHES)]


def _dead(model: Model, run: str, block: int, head: int, features: list[int]) -> None:
    """Let a head and some hidden features of a block add nothing."""
    part: Any = getattr(model, run).blocks[block]
    size = part.attention.shared * part.attention.head_width
    with torch.no_grad():
        part.attention.out.weight[:, head * size : (head + 1) * size] = 0.0
        part.mlp.down.weight[..., features] = 0.0
        if part.cross is not None:
            part.cross.out.weight[:, head * size : (head + 1) * size] = 0.0


@pytest.mark.parametrize("form", ["grouped", "bart", "mixtral"])
def test_taylor_is_the_gradient_of_a_mask(form: str) -> None:
    config = (
        small("llama-tiny", heads=4, kv_heads=2, head_features=4)
        if form == "grouped"
        else ENROLLED[form].config
    )
    model = _model(config)
    run = model.graph.runs[-1].name
    block: Any = getattr(model, run).blocks[1]
    found = part_scores(model, run, _data(config), loss, "taylor")[1]
    groups, size = len(found.heads), block.attention.shared * block.attention.head_width
    expected = torch.zeros(groups)
    for batch in _data(config):
        mask = torch.ones(groups, requires_grad=True)
        handle = block.attention.out.register_forward_pre_hook(
            lambda _, inputs, mask=mask: (inputs[0] * mask.repeat_interleave(size),)
        )
        loss(model, batch).backward()
        handle.remove()
        assert mask.grad is not None
        expected += mask.grad.abs() / BATCHES
    torch.testing.assert_close(found.heads.float(), expected)
    assert found.hidden.shape == ((4, 32) if form == "mixtral" else (32,))


def test_activation_is_the_size_of_what_a_part_adds() -> None:
    config = ENROLLED["bert"].config
    model = _model(config)
    down: Any = model.encoder.blocks[0].mlp.down
    seen: list[Tensor] = []
    handle = down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    found = part_scores(model, "encoder", _data(config), loss, "activation")[0]
    handle.remove()
    added = torch.cat(seen)[:, 5, None] * down.weight[:, 5]  # of one feature, at all tokens
    torch.testing.assert_close(found.hidden[5].float(), added.norm())


@pytest.mark.parametrize("criterion", get_args(Criterion))
@pytest.mark.parametrize("form", ["gpt", "t5", "bart", "modernbert", "marian moe", "vit"])
def test_what_adds_nothing_goes_first(form: str, criterion: Criterion) -> None:
    config = ENROLLED[form].config
    model = _model(config)
    for run in model.graph.runs:
        for number in range(run.stack.depth):
            _dead(model, run.name, number, 1, [*range(3, 11)])
    data = _data(config)
    with torch.no_grad():
        expected = float(loss(model, data[0]))
    options = Prune(heads=0.5, hidden=0.25, by=criterion, multiple=8)
    made = list(cuts(model, options, data, loss, multiple=8))
    smaller = made[-1].model
    for run in smaller.graph.runs:
        assert {(layer.heads, layer.perceptron.width) for layer in run.stack.layers} == {(1, 24)}
    with torch.no_grad():
        assert float(loss(smaller, data[0])) == pytest.approx(expected, rel=1e-5)
    assert made[0].words.endswith("heads 4 → 2") or form == "modernbert"
    assert smaller.config == sized(config, options, multiple=8)


@pytest.mark.parametrize("form", ["gpt", "bart"])
def test_layers_that_change_nothing_go_first(form: str) -> None:
    config: Any = replace(ENROLLED[form].config)
    if form == "gpt":
        config = replace(config, depth=4)
    else:
        config = replace(config, decoder=replace(config.decoder, depth=4))
    model = _model(config)
    run = model.graph.runs[-1].name
    block: Any = getattr(model, run).blocks[2]
    with torch.no_grad():
        for part in (block.attention.out, block.mlp.down, *([block.cross.out] if block.cross else [])):
            part.weight.zero_()
            part.bias.zero_()
        for norm in (block.norm1, block.norm2, *([block.cross_norm] if block.cross else [])):
            norm.weight.fill_(1.0)
            norm.bias.zero_()
    assert layers_to_keep(model, run, 3, _data(config), loss, "activation") == [0, 1, 3]
    found = layers_to_keep(model, run, 3, _data(config), loss, "loss")
    without = {
        i: mean_loss(keep_layers(model, run, [j for j in range(4) if j != i]), _data(config), loss)
        for i in range(4)
    }
    assert {*range(4)} - {*found} == {min(without, key=without.__getitem__)}
    # A norm of what is normed already differs by its eps.
    assert without[2] == pytest.approx(mean_loss(model, _data(config), loss), rel=1e-3)
    assert layers_to_keep(model, run, 2, [], loss, "even") == [0, 3]


@pytest.mark.parametrize("by_error", [True, False])
def test_experts_that_do_least_score_least(by_error: bool) -> None:
    """One is never visited, the outputs of another are nothing but those of the one that takes its place."""
    config = ENROLLED["mixtral"].config
    model = _model(config)
    mixture: Any = model.decoder.blocks[0].mlp
    mixture.router.register_forward_hook(lambda _, __, logits: logits.index_fill(1, torch.tensor([2]), -1e9))
    found = expert_scores(model, "decoder", _data(config), loss, by_error=by_error)[0]
    assert found is not None
    assert int(found.argmin()) == 2
    assert found[2] < 1e-6 < found[[0, 1, 3]].min()
    smaller = list(cuts(_model(config), Prune(experts=0.5), _data(config), loss, multiple=8))[-1].model
    assert smaller.graph.runs[0].stack.experts == 2


def test_unequal_blocks_come_out_where_parts_matter_unequally() -> None:
    config = small("gpt-tiny", heads=4, mlp_width=64)
    model = _model(config)
    with torch.no_grad():
        model.decoder.blocks[0].mlp.down.weight.mul_(1e-3)
        model.decoder.blocks[1].attention.out.weight.mul_(1e-3)
    made = list(cuts(model, Prune(heads=0.375, hidden=0.5), _data(config), loss, multiple=16))
    first, second = made[-1].model.graph.runs[0].stack.layers
    assert (first.heads, first.perceptron.width) == (4, 16)
    assert (second.heads, second.perceptron.width) == (1, 48)
    with pytest.raises(ConfigError, match="removes nothing"):
        list(cuts(model, Prune(hidden=0.01), _data(config), loss, multiple=16))
    blocks = _model(ENROLLED["experts of blocks"].config)
    with pytest.raises(ConfigError, match="blocks of experts cannot be pruned"):  # whatever its data reaches
        list(cuts(blocks, Prune(heads=0.5, by="activation"), [], loss, multiple=16))
