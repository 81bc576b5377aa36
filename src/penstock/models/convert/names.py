"""Names and shapes of weights in transformers' text models: one table per family, and one way to read all tables.

A table says for each of our modules which of theirs hold its weights, and how several are put together. `{i}` is the
number of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penstock.config.model import Seq2SeqConfig, TextConfig
from penstock.config.stack import Stack
from penstock.dtypes import FLOATS


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """Where the weights of one of our modules lie in transformers' model."""

    names: tuple[str, ...]
    """Modules, or parameters where ours is one."""
    form: Literal["same", "heads", "rows", "experts"] = "same"
    """`heads`: queries, keys and values, which we order by head; `rows`: one after the other; `experts`: the same for
    each expert `{e}`, which are our first dimension."""
    transposed: bool = False
    """Whether weights are stored as (in, out)."""
    unused: int = 0
    """Rows of a table of positions that come before the first and are never read."""


Names = Mapping[str, WeightPlaces]


def _one(name: str, **more: Any) -> WeightPlaces:
    return WeightPlaces((name,), **more)


def _heads(place: str, *names: str) -> WeightPlaces:
    return WeightPlaces(tuple(place + name for name in names), "heads")


def gpt2_names(config: TextConfig) -> Names:
    here = "transformer.h.{i}."
    return {
        "tokens": _one("transformer.wte"),
        "decoder.places": _one("transformer.wpe"),
        "decoder.norm": _one("transformer.ln_f"),
        "head": _one("lm_head"),
        "decoder.blocks.{i}.norm1": _one(here + "ln_1"),
        "decoder.blocks.{i}.attention.qkv": _one(here + "attn.c_attn", form="heads", transposed=True),
        "decoder.blocks.{i}.attention.out": _one(here + "attn.c_proj", transposed=True),
        "decoder.blocks.{i}.norm2": _one(here + "ln_2"),
        "decoder.blocks.{i}.mlp.up": _one(here + "mlp.c_fc", transposed=True),
        "decoder.blocks.{i}.mlp.down": _one(here + "mlp.c_proj", transposed=True),
    }


def llama_names(config: TextConfig) -> Names:
    here = "model.layers.{i}."
    return {
        "tokens": _one("model.embed_tokens"),
        "decoder.norm": _one("model.norm"),
        "head": _one("lm_head"),
        "decoder.blocks.{i}.norm1": _one(here + "input_layernorm"),
        "decoder.blocks.{i}.attention.qkv": _heads(here + "self_attn.", "q_proj", "k_proj", "v_proj"),
        "decoder.blocks.{i}.attention.q_norm": _one(here + "self_attn.q_norm"),
        "decoder.blocks.{i}.attention.k_norm": _one(here + "self_attn.k_norm"),
        "decoder.blocks.{i}.attention.out": _one(here + "self_attn.o_proj"),
        "decoder.blocks.{i}.norm2": _one(here + "post_attention_layernorm"),
        "decoder.blocks.{i}.mlp.up": WeightPlaces((here + "mlp.gate_proj", here + "mlp.up_proj"), "rows"),
        "decoder.blocks.{i}.mlp.down": _one(here + "mlp.down_proj"),
    }


def mixtral_names(config: TextConfig) -> Names:
    here = "model.layers.{i}.block_sparse_moe."
    return {**llama_names(config), **_mixtures(config, "decoder", here, "gate", "{e}", ("w1", "w3"), "w2")}


def qwen_moe_names(config: TextConfig) -> Names:
    up = ("gate_proj", "up_proj")
    here = "model.layers.{i}.mlp."
    return {**llama_names(config), **_mixtures(config, "decoder", here, "gate", "{e}", up, "down_proj")}


def _mixtures(
    config: TextConfig, side: str, place: str, router: str, expert: str, up: tuple[str, ...], down: str
) -> dict[str, WeightPlaces]:
    """The mixtures of a stack, at `place` in blocks that have them, as they are stored."""
    table = {}
    for number, layer in enumerate(_stack_of(config, side).layers):
        if layer.mixture:
            prefix, here = f"{side}.blocks.{number}.mlp.", place.replace("{i}", str(number))
            experts = f"{here}experts.{expert}."
            table[prefix + "router"] = _one(here + router)
            table[prefix + "up"] = WeightPlaces(tuple(experts + name for name in up), "experts")
            table[prefix + "down"] = WeightPlaces((experts + down,), "experts")
    return table


def bert_names(config: TextConfig) -> Names:
    here, words = "bert.encoder.layer.{i}.", "cls.predictions."
    return {
        "tokens": _one("bert.embeddings.word_embeddings"),
        "types": _one("bert.embeddings.token_type_embeddings"),
        "encoder.places": _one("bert.embeddings.position_embeddings"),
        "encoder.embedding_norm": _one("bert.embeddings.LayerNorm"),
        "encoder.blocks.{i}.attention.qkv": _heads(here + "attention.self.", "query", "key", "value"),
        "encoder.blocks.{i}.attention.out": _one(here + "attention.output.dense"),
        "encoder.blocks.{i}.norm1": _one(here + "attention.output.LayerNorm"),
        "encoder.blocks.{i}.mlp.up": _one(here + "intermediate.dense"),
        "encoder.blocks.{i}.mlp.down": _one(here + "output.dense"),
        "encoder.blocks.{i}.norm2": _one(here + "output.LayerNorm"),
        "transform.dense": _one(words + "transform.dense"),
        "transform.norm": _one(words + "transform.LayerNorm"),
        "pooler.dense": _one("bert.pooler.dense"),
        **(
            {"head": _one("classifier")}
            if getattr(config, "head", "") == "classes"
            # transformers has two biases. Untied ones are not the same, and it adds that of the decoder.
            else {
                "head": _one(words + "decoder"),
                "head.bias": _one(words + ("" if config.tied else "decoder.") + "bias"),
            }
        ),
    }


def modernbert_names(config: TextConfig) -> Names:
    here, classes = "model.layers.{i}.", getattr(config, "head", "") == "classes"
    return {
        "tokens": _one("model.embeddings.tok_embeddings"),
        "encoder.embedding_norm": _one("model.embeddings.norm"),
        "encoder.norm": _one("model.final_norm"),
        "encoder.blocks.{i}.norm1": _one(here + "attn_norm"),
        "encoder.blocks.{i}.attention.qkv": _one(here + "attn.Wqkv", form="heads"),
        "encoder.blocks.{i}.attention.out": _one(here + "attn.Wo"),
        "encoder.blocks.{i}.norm2": _one(here + "mlp_norm"),
        "encoder.blocks.{i}.mlp.up": _one(here + "mlp.Wi"),
        "encoder.blocks.{i}.mlp.down": _one(here + "mlp.Wo"),
        "transform.dense": _one("head.dense"),
        "transform.norm": _one("head.norm"),
        "pooler.dense": _one("head.dense"),
        "pooler.norm": _one("head.norm"),
        "head": _one("classifier" if classes else "decoder"),
    }


def switch_names(config: TextConfig) -> Names:
    """T5's, whose perceptrons are called otherwise, with mixtures."""
    table = dict(t5_names(config, "mlp"))
    for side, last in (("encoder", 1), ("decoder", 2)):
        here = f"{side}.block.{{i}}.layer.{last}.mlp."
        table |= _mixtures(config, side, here, "router.classifier", "expert_{e}", ("wi",), "wo")
    return table


def t5_names(config: TextConfig, perceptron: str = "DenseReluDense") -> Names:
    table: dict[str, WeightPlaces] = {"tokens": _one("shared"), "head": _one("lm_head")}
    for side, last, mlp in (
        ("encoder", 1, _stack_of(config, "encoder")),
        ("decoder", 2, _stack_of(config, "decoder")),
    ):
        prefix, here = f"{side}.blocks.{{i}}.", f"{side}.block.{{i}}."
        first, dense = here + "layer.0.", f"{here}layer.{last}.{perceptron}."
        up = WeightPlaces((dense + "wi_0", dense + "wi_1"), "rows") if mlp.gated else _one(dense + "wi")
        table |= {
            f"{side}.relative": _one(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"),
            f"{side}.norm": _one(f"{side}.final_layer_norm"),
            prefix + "norm1": _one(first + "layer_norm"),
            prefix + "attention.qkv": _heads(first + "SelfAttention.", "q", "k", "v"),
            prefix + "attention.out": _one(first + "SelfAttention.o"),
            prefix + "norm2": _one(f"{here}layer.{last}.layer_norm"),
            prefix + "mlp.up": up,
            prefix + "mlp.down": _one(dense + "wo"),
        }
    other = "decoder.block.{i}.layer.1."
    return table | {
        "decoder.blocks.{i}.cross_norm": _one(other + "layer_norm"),
        "decoder.blocks.{i}.cross.q": _one(other + "EncDecAttention.q"),
        "decoder.blocks.{i}.cross.kv": _heads(other + "EncDecAttention.", "k", "v"),
        "decoder.blocks.{i}.cross.out": _one(other + "EncDecAttention.o"),
    }


def bart_names(config: TextConfig) -> Names:
    """BART and Marian, whose positions are no weights."""
    table: dict[str, WeightPlaces] = {
        "tokens": _one("model.shared"),
        "head": _one("lm_head"),
        "head.bias": _one("final_logits_bias"),
    }
    for side in ("encoder", "decoder"):
        prefix, here = f"{side}.blocks.{{i}}.", f"model.{side}.layers.{{i}}."
        table |= {
            f"{side}.places": _one(f"model.{side}.embed_positions", unused=2),
            f"{side}.embedding_norm": _one(f"model.{side}.layernorm_embedding"),
            prefix + "attention.qkv": _heads(here + "self_attn.", "q_proj", "k_proj", "v_proj"),
            prefix + "attention.out": _one(here + "self_attn.out_proj"),
            prefix + "norm1": _one(here + "self_attn_layer_norm"),
            prefix + "mlp.up": _one(here + "fc1"),
            prefix + "mlp.down": _one(here + "fc2"),
            prefix + "norm2": _one(here + "final_layer_norm"),
        }
    here = "model.decoder.layers.{i}."
    return table | {
        "decoder.blocks.{i}.cross_norm": _one(here + "encoder_attn_layer_norm"),
        "decoder.blocks.{i}.cross.q": _one(here + "encoder_attn.q_proj"),
        "decoder.blocks.{i}.cross.kv": _heads(here + "encoder_attn.", "k_proj", "v_proj"),
        "decoder.blocks.{i}.cross.out": _one(here + "encoder_attn.out_proj"),
    }


def nllb_moe_names(config: TextConfig) -> Names:
    """BART's, with a norm at the end of each stack, other names of perceptrons, and mixtures."""
    table = dict(bart_names(config))
    for side in ("encoder", "decoder"):
        prefix, here = f"{side}.blocks.{{i}}.", f"model.{side}.layers.{{i}}."
        table |= {
            f"{side}.norm": _one(f"model.{side}.layer_norm"),
            prefix + "mlp.up": _one(here + "ffn.fc1"),
            prefix + "mlp.down": _one(here + "ffn.fc2"),
            prefix + "norm2": _one(here + "ff_layer_norm"),
            **_mixtures(config, side, here + "ffn.", "router.classifier", "expert_{e}", ("fc1",), "fc2"),
        }
    return {
        name: WeightPlaces(
            tuple(n.replace("encoder_attn", "cross_attention") for n in entry.names), entry.form
        )
        for name, entry in table.items()
    }


def _stack_of(config: TextConfig, name: str) -> Stack:
    stack: Stack = getattr(config, name) if isinstance(config, Seq2SeqConfig) else config
    return stack


def _places(name: str, table: Names) -> tuple[WeightPlaces, tuple[str, ...]]:
    """The entry for one of our parameters, and the names of theirs."""
    number = re.search(r"\.blocks\.(\d+)\.", name)
    pattern = re.sub(r"\.blocks\.\d+\.", ".blocks.{i}.", name)
    i = number.group(1) if number else ""
    if pattern in table:
        return table[pattern], tuple(each.replace("{i}", i) for each in table[pattern].names)
    module, _, kind = pattern.rpartition(".")
    # Blocks that differ from the others have entries of their own.
    entry = table.get(name.rpartition(".")[0]) or table[module]
    return entry, tuple(f"{each.replace('{i}', i)}.{kind}" for each in entry.names)


def to_library(state: Mapping[str, Tensor], config: TextConfig, table: Names) -> dict[str, Tensor]:
    """Our state dict in transformers' names and shapes; what is tied appears once."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and (name != "head.weight" or not shares_head(config)):
            converted |= _in_library(name, tensor, config, table)
    return converted


def _in_library(name: str, tensor: Tensor, config: TextConfig, table: Names) -> dict[str, Tensor]:
    """One of our weights in transformers' names and shapes."""
    entry, names = _places(name, table)
    if entry.form == "experts":
        names = tuple(each.replace("{e}", str(e)) for e in range(len(tensor)) for each in names)
    parts = _split(tensor, name, entry, config)
    if len(names) == 1 and len(parts) > 1:
        parts = [torch.cat(parts)]
    if names == ("final_logits_bias",):
        parts = [parts[0][None]]
    turned = (part.T if entry.transposed and part.ndim == 2 else part for part in parts)
    return dict(zip(names, turned))


class Converted(NamedTuple):
    """transformers' state dict in our names and shapes."""

    state: dict[str, Tensor]
    """A name of ours for which theirs lack a weight, or have one that does not fit, is absent."""
    misfits: dict[str, str]
    """For a name of ours, the sentence about the weight of theirs that does not fit."""
    left: list[str]
    """Which of theirs were not used."""


def from_library(
    state: Mapping[str, Tensor], config: TextConfig, table: Names, expected: Mapping[str, Tensor]
) -> Converted:
    """transformers' state dict in our names and shapes, `expected` being ours. Each weight is held to the shape and
    the type that it must have there, before anything is made of it.
    """
    weights, misfits, used = dict[str, Tensor](), dict[str, str](), set[str]()
    for name, tensor in expected.items():
        if name == "head.weight" and shares_head(config):
            continue
        if not tensor.is_floating_point():
            weights[name] = torch.zeros_like(tensor)  # visits of experts, of which nothing is known
            continue
        wanted = _in_library(name, tensor.to("meta"), config, table)
        if not wanted.keys() <= state.keys():
            continue
        used |= wanted.keys()
        wrong = [problem for key in wanted if (problem := misfit(key, state[key], wanted[key]))]
        if wrong:
            misfits[name] = wrong[0]
            continue
        entry, _ = _places(name, table)
        parts = [state[key] for key in wanted]
        parts = [part.T if entry.transposed and part.ndim == 2 else part for part in parts]
        weights[name] = _joined(parts, name, entry, config)
    if shares_head(config) and "tokens.weight" in weights:
        weights["head.weight"] = weights["tokens.weight"]
    elif shares_head(config) and "tokens.weight" in misfits:
        misfits["head.weight"] = misfits["tokens.weight"]
    return Converted(weights, misfits, [name for name in state if name not in used])


def misfit(name: str, given: Tensor, expected: Tensor) -> str | None:
    """Why a weight cannot be the model's, as a sentence. One type of floating-point numbers may become another;
    anything else would be cast without a word.
    """
    if given.shape != expected.shape:
        return f"{name} is {tuple(given.shape)}, but the model's is {tuple(expected.shape)}."
    if given.is_complex() or (given.dtype in FLOATS) is not expected.is_floating_point():
        return f"{name} is of {given.dtype}, but the model's is of {expected.dtype}; give floating-point weights."
    return None


def shares_head(config: TextConfig) -> bool:
    """Whether the weight of the head is the table of tokens."""
    return bool(config.graph.tied)


def _sizes(name: str, config: TextConfig) -> tuple[int, list[int]]:
    """Features of a head, and how many heads queries, keys and values have for each head of keys."""
    stack = _stack_of(config, name.partition(".")[0])
    return stack.head_width, [1, 1] if ".cross.kv." in name else [stack.heads // stack.kv, 1, 1]


def _split(tensor: Tensor, name: str, entry: WeightPlaces, config: TextConfig) -> list[Tensor]:
    if entry.unused:
        return [torch.cat([tensor.new_zeros(entry.unused, tensor.shape[1]), tensor])]
    if entry.form == "rows":
        return list(tensor.chunk(len(entry.names)))
    if entry.form == "experts":
        return [part for one in tensor.unbind(0) for part in one.chunk(len(entry.names))]
    if entry.form == "same":
        return [tensor]
    features, each = _sizes(name, config)
    groups = tensor.view(-1, sum(each), features, *tensor.shape[1:]).split_with_sizes(each, dim=1)
    return [part.flatten(0, 2).contiguous() for part in groups]


def _joined(parts: list[Tensor], name: str, entry: WeightPlaces, config: TextConfig) -> Tensor:
    if entry.unused:
        return parts[0][entry.unused :]
    if entry.form == "rows":
        return torch.cat(parts)
    if entry.form == "experts":
        count = len(entry.names)
        return torch.stack([torch.cat(parts[at : at + count]) for at in range(0, len(parts), count)])
    if entry.form == "same":
        return parts[0][0] if entry.names == ("final_logits_bias",) else parts[0]
    features, each = _sizes(name, config)
    if len(parts) == 1:
        heads = parts[0].shape[0] // features // sum(each)
        parts = list(parts[0].split_with_sizes([heads * n * features for n in each]))
    groups = [part.reshape(-1, n, features, *part.shape[1:]) for part, n in zip(parts, each)]
    return torch.cat(groups, dim=1).flatten(0, 2)


def left_over(names: list[str], ignored: str) -> tuple[list[str], list[str]]:
    """The weights that no module of ours takes: those that may be left out, by a regular expression, and the others."""
    free = [name for name in names if re.search(ignored, name)]
    return free, [name for name in names if name not in free]
