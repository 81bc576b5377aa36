"""Parts that are removed leave what masked ones leave, and the smaller models are models like any other."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches, flat, small
from penstock.compress.prune import keep_experts, keep_heads, keep_hidden, keep_layers
from penstock.config.layer import LayerSizes
from penstock.config.model import ModelConfig, with_stacks
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.models.expert_linear import ExpertLinear
from penstock.models.model import Model

FORMS = {
    **{
        name: one.config
        for name, one in ENROLLED.items()
        if name not in ("vit moe", "experts of blocks", "olmo")
    },
    "grouped": small("llama-tiny", heads=6, kv_heads=3, head_features=4),
    "sigmoid": small(
        "mixtral-tiny", router="sigmoid", shared_experts=2, head_features=4, heads=4, kv_heads=2
    ),
    "groups": small("mixtral-tiny", experts=6, router_groups=2, groups_per_token=2),
}
"""A small model of every form of block."""


def _model(config: ModelConfig) -> Model:
    torch.manual_seed(1)
    model = create(config).double().eval()
    for parameter in model.parameters():  # biases and norms are not drawn
        nn.init.normal_(parameter, std=0.3)
    return model


def _outputs(model: Model, config: ModelConfig) -> Tensor:
    *arguments, _ = batches(config, 3, 4)
    cast = [value.double() if value.is_floating_point() else value for value in arguments]
    with torch.no_grad():
        return flat(model(*cast))


@contextmanager
def _masked(linear: nn.Module, mask: Tensor) -> Iterator[None]:
    """Inside, inputs of a linear layer are multiplied by a mask: (features,), of experts (E, features)."""

    def hide(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        factor = mask[inputs[2]] if isinstance(module, ExpertLinear) else mask
        return (inputs[0] * factor, *inputs[1:])

    handle = linear.register_forward_pre_hook(hide)
    yield
    handle.remove()


def _some(generator: random.Random, count: int) -> list[int]:
    """A part of so many numbers that leaves one out where there are several."""
    return sorted(generator.sample(range(count), max(1, count - generator.randint(1, max(1, count // 2)))))


def _mask(kept: Sequence[int], count: int, size: int = 1) -> Tensor:
    mask = torch.zeros(count, dtype=torch.float64)
    mask[list(kept)] = 1.0
    return mask.repeat_interleave(size)


@pytest.mark.parametrize("form", FORMS)
def test_masked_parts_are_removed_parts(form: str) -> None:
    """Heads and hidden features of each block, chosen by chance: outputs within 1e-6, in fp64 so that nothing hides."""
    config, generator = FORMS[form], random.Random(form)
    model, masks, smaller = _model(config), ExitStack(), None
    smaller = model
    for run in model.graph.runs:
        stack, blocks = run.stack, getattr(model, run.name).blocks
        groups, cross, columns, shared = [], [], [], []
        same = _some(generator, stack.layers[0].kv_heads)
        for block, layer in zip(blocks, stack.layers):
            size = layer.queries_per_key * layer.value_width
            groups.append(same if stack.biased else _some(generator, layer.kv_heads))
            masks.enter_context(_masked(block.attention.out, _mask(groups[-1], layer.kv_heads, size)))
            if block.cross is not None:
                cross.append(sorted(generator.sample(range(layer.kv_heads), len(groups[-1]))))
                masks.enter_context(_masked(block.cross.out, _mask(cross[-1], layer.kv_heads, size)))
            hidden = layer.perceptron.width
            left = generator.randint(hidden // 2, hidden - 1)
            rows = [
                sorted(generator.sample(range(hidden), left))
                for _ in range(stack.experts if layer.mixture else 1)
            ]
            kept = torch.tensor(rows)
            columns.append(kept if layer.mixture else kept[0])
            mask = torch.stack([_mask(row, hidden) for row in rows])
            masks.enter_context(_masked(block.mlp.down, mask if layer.mixture else mask[0]))
            shared.append(None)
            if layer.mixture and stack.shared_experts:
                whole = hidden * stack.shared_experts
                shared[-1] = torch.tensor(sorted(generator.sample(range(whole), left * stack.shared_experts)))
                masks.enter_context(_masked(block.mlp.shared.down, _mask(shared[-1].tolist(), whole)))
        smaller = keep_hidden(keep_heads(smaller, run.name, groups, cross or None), run.name, columns, shared)
    with masks:
        expected = _outputs(model, config)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(_outputs(smaller, config), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(_outputs(model, config), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["gpt", "bert", "modernbert", "t5", "pruned", "vit", "mixtral"])
def test_removed_layers_are_passed_by(form: str) -> None:
    config = FORMS[form]
    model = _model(config)
    run = model.graph.runs[-1]
    blocks = getattr(model, run.name).blocks
    smaller = keep_layers(model, run.name, list(range(1, len(blocks))))
    assert smaller.graph.run(run.name).stack.depth == len(blocks) - 1
    del blocks[0]  # as if it were the identity
    torch.testing.assert_close(_outputs(smaller, config), _outputs(model, config), rtol=0, atol=0)


@pytest.mark.parametrize(
    "form", ["mixtral", "qwen moe", "switch", "nllb moe", "marian moe", "sigmoid", "groups"]
)
def test_removed_experts_are_those_that_no_token_is_sent_to(form: str) -> None:
    config = FORMS[form]
    config = replace(config, experts_per_token=1) if form == "groups" else config
    model, smaller = _model(config), None
    smaller, groups = model, 2 if form == "groups" else 1
    for run in model.graph.runs:
        count = run.stack.experts
        kept = [e for e in range(count) if e % (count // groups)]
        gone = torch.tensor([e for e in range(count) if e not in kept])
        for block, layer in zip(getattr(model, run.name).blocks, run.stack.layers):
            if not layer.mixture:
                continue
            block.mlp.router.register_forward_hook(
                lambda _, __, logits, gone=gone: logits.index_fill(1, gone, -torch.inf)
            )
            if block.mlp.correction is not None:
                block.mlp.correction[gone] = -(2**56)
        smaller = keep_experts(
            smaller, run.name, [kept if layer.mixture else None for layer in run.stack.layers]
        )
    torch.testing.assert_close(_outputs(smaller, config), _outputs(model, config), rtol=1e-6, atol=1e-6)


REFUSED: dict[str, tuple[str, Callable[[Model], object], str]] = {
    "a block twice": ("gpt", lambda m: keep_layers(m, "decoder", [1, 1]), "numbers from 0 to 1, ascending"),
    "no block": ("gpt", lambda m: keep_layers(m, "decoder", []), "at least one"),
    "no such run": ("gpt", lambda m: keep_layers(m, "encoder", [0]), "it has decoder"),
    "other heads": ("t5", lambda m: keep_heads(m, "encoder", [[0], [1]]), "share the relative biases"),
    "too many heads": ("gpt", lambda m: keep_heads(m, "decoder", [[0, 2], [0]]), "from 0 to 1"),
    "cross attention": ("bart", lambda m: keep_heads(m, "decoder", [[0], [0]]), "with cross attention"),
    "unequal experts": (
        "mixtral",
        lambda m: keep_experts(m, "decoder", [[0, 1], [0, 1, 2]]),
        "many in each",
    ),
    "no mixture": ("gpt", lambda m: keep_experts(m, "decoder", [[0], [0]]), "many in each"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_removed_is_refused(case: str) -> None:
    form, call, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        call(_model(FORMS[form]))


def test_alibi_s_heads_stay() -> None:
    model = _model(small("gpt-tiny", positions="alibi"))
    with pytest.raises(ConfigError, match="ALiBi"):
        keep_heads(model, "decoder", [[0], [0]])
    model = _model(ENROLLED["olmo"].config)
    with pytest.raises(ConfigError, match="share the norms of their queries and keys"):
        keep_heads(model, "decoder", [[0], [0]])


_OPENED = """
import sys, torch
from pathlib import Path
from penstock.models.convert import from_pretrained
for folder in sorted(Path(sys.argv[1]).iterdir()):
    torch.save(from_pretrained(folder).state_dict(), folder / "again.pt")
"""


def _unequal(generator: random.Random, stack: Any) -> Any:
    """The stack with other layers, of sizes by chance."""
    layers = list[LayerSizes]()
    for _ in range(generator.randint(1, 4)):
        layer = stack.layers[generator.randrange(len(stack.layers))].sizes
        if not stack.biased:  # a bias by distance is one of as many heads in every layer
            kv = generator.randint(1, 3)
            layer = replace(layer, kv=kv, heads=kv * generator.randint(1, 2))
        layers.append(replace(layer, hidden=generator.randint(1, 20)))
    return replace(stack, depth=len(layers), unequal=tuple(layers))


@pytest.mark.slow
def test_random_unequal_models_are_opened_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    generator = random.Random(5)
    forms = ["vit", "gpt", "llama", "bert", "qwen moe", "modernbert", "marian", "t5"]
    models: dict[Path, Model] = {}
    for number in range(24):
        config = with_stacks(FORMS[generator.choice(forms)], partial(_unequal, generator))
        models[tmp_path / f"{number:03}"] = model = create(config)
        save_pretrained(model, tmp_path / f"{number:03}")
    assert sum(run.stack.unequal != () for model in models.values() for run in model.graph.runs) > 12
    subprocess.run([sys.executable, "-c", _OPENED, str(tmp_path)], check=True)
    for folder, model in models.items():
        here, there = from_pretrained(folder), torch.load(folder / "again.pt", weights_only=True)
        assert here.config == model.config
        for name, value in model.state_dict().items():
            assert torch.equal(here.state_dict()[name], value), (folder, name)
            assert torch.equal(there[name], value), (folder, name)


def test_layers_that_are_alike_need_no_list() -> None:
    """So that transformers has such a model."""
    model = _model(small("llama-tiny", depth=4, heads=4, kv_heads=2, head_features=4))
    smaller: Any = keep_heads(model, "decoder", [[1]] * 4).config
    assert smaller.unequal == ()
    assert [layer.sizes for layer in smaller.layers] == [LayerSizes(heads=2, kv=1, hidden=32)] * 4
