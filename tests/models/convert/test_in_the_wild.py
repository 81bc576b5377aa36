"""Well-known checkpoints in the form in which they lie on the hub: options that no class of transformers reads, names
of weights from other times, and buffers. Each is a small random model with what the real one's files have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained

transformers = pytest.importorskip("transformers")

State = dict[str, Tensor]
WORDS, LENGTH = 40, 16


class Found(NamedTuple):
    """One checkpoint: transformers' class, its sizes, and how its files differ from those that it would write now."""

    cls: str
    sizes: dict[str, Any]
    options: dict[str, Any]
    weights: Callable[[State], State]


def _masks(state: State) -> State:
    """GPT-2's, without the base model's prefix and with the masks of its attention."""
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril() for i in range(2)}
    return {name.removeprefix("transformer."): value for name, value in state.items()} | masks


def _old_norms(state: State) -> State:
    """BERT's, as TensorFlow named them, with the head of the next sentence and the positions' numbers."""
    renamed = {
        re.sub(
            r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
        ): value
        for name, value in state.items()
    }
    words, bias = state["bert.embeddings.word_embeddings.weight"], state["cls.predictions.bias"]
    return renamed | {
        "cls.predictions.decoder.weight": words.clone(), "cls.predictions.decoder.bias": bias.clone(),
        "cls.seq_relationship.weight": torch.zeros(2, 16), "cls.seq_relationship.bias": torch.zeros(2),
        "bert.embeddings.position_ids": torch.arange(LENGTH)[None],
    }  # fmt: skip


def _all_tables(state: State) -> State:
    """T5's, with the shared table under all of its names and a bias that nothing reads."""
    words = state["shared.weight"]
    return state | {
        "encoder.embed_tokens.weight": words.clone(), "decoder.embed_tokens.weight": words.clone(),
        "lm_head.weight": words.clone(),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(32, 2),
    }  # fmt: skip


def _own_head(state: State) -> State:
    """T5 1.1's, whose head is a table of its own."""
    return state | {"lm_head.weight": torch.full((WORDS, 16), 0.5)}


def _bare(state: State) -> State:
    """BART's, without the prefix of the model inside."""
    return {name.removeprefix("model."): value for name, value in state.items()}


def _frequencies(state: State) -> State:
    return state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


def _untied_places(state: State) -> State:
    """RoBERTa's, with a pooler and the numbers of positions."""
    more = {"roberta.pooler.dense.weight": torch.zeros(16, 16), "roberta.pooler.dense.bias": torch.zeros(16)}
    return state | more | {"roberta.embeddings.position_ids": torch.arange(LENGTH)[None]}


_DATA = json.loads((Path(__file__).parent / "hub_checkpoints.json").read_text(encoding="utf-8"))
FOUND: dict[str, Found] = {
    name: Found(
        cls, _DATA["sizes"].get(sizes, {}) | changes, options, globals()[f"_{form}"] if form else dict
    )
    for name, (cls, sizes, changes, options, form) in _DATA["found"].items()
}


def _written(name: str, folder: Path) -> Any:
    """The checkpoint in a folder, and transformers' model that it was made of, which computes what it should."""
    found = FOUND[name]
    torch.manual_seed(0)
    cls = getattr(transformers, found.cls)
    given = {key: value for key, value in found.options.items() if key.startswith(("rope_theta", "sliding"))}
    model = cls(cls.config_class(**found.sizes, **given)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    weights = found.weights(load_file(folder / "model.safetensors"))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | found.options
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if found.weights is _own_head:
        model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])
        model.config.scale_decoder_outputs = False
    return model


@pytest.mark.parametrize("name", FOUND)
def test_a_checkpoint_of_the_hub_computes_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = _written(name, tmp_path)
    ours: Any = from_pretrained(tmp_path).eval()
    tokens, target = torch.randint(3, WORDS - 1, (2, 9)), torch.randint(3, WORDS - 1, (2, 5))
    lengths = torch.tensor([9, 9])
    with torch.no_grad():
        if theirs.config.is_encoder_decoder:
            got = ours(tokens, target, lengths)
            expected = theirs(input_ids=tokens, decoder_input_ids=target, use_cache=False).logits
        else:
            got = ours(tokens, lengths) if ours.graph.padded else ours(tokens)
            expected = theirs(input_ids=tokens).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_an_option_that_is_on_and_not_known_is_refused_still(tmp_path: Path) -> None:
    _written("Qwen2.5-0.5B", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"use_mrope": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="use_mrope True"):
        from_pretrained(tmp_path)
