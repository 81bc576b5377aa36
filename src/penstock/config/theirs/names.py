"""Names of weights in transformers' text models: one table per family.

A table says for each of our modules which of theirs hold its weights, and how several are put together. `{i}` is the
number of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.model import Seq2SeqConfig, TextConfig, ViTConfig
from penstock.config.stack import Stack


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """Where the weights of one of our modules lie in transformers' model."""

    names: tuple[str, ...]
    """Modules, or parameters where ours is one."""
    form: Literal["same", "heads", "rows", "experts", "turns", "units"] = "same"
    """`heads`: queries, keys and values, which we order by head; `rows`: one after the other; `experts`: the same for
    each expert `{e}`, which are our first dimension; `turns`: of all experts in one, with outputs of gate and others by
    turns; `units`: numbers, which are whole multiples of `UNIT` here."""
    transposed: bool = False
    """Whether weights are stored as (in, out), of experts as (E, in, out)."""
    unused: int = 0
    """Rows of a table of positions that come before the first and are never read."""
    shape: tuple[int, ...] = ()
    """The shape there of what has another here; −1 is the size that is left."""


Names = Mapping[str, WeightPlaces]


def _one(name: str, **more: Any) -> WeightPlaces:
    return WeightPlaces((name,), **more)


def _heads(place: str, *names: str) -> WeightPlaces:
    return WeightPlaces(tuple(place + name for name in names), "heads")


_QKV = WeightPlaces(("model.layers.{i}.self_attn.qkv_proj",), "heads")
_GATE_UP = WeightPlaces(("model.layers.{i}.mlp.gate_up_proj",))
"""Projections that some families have in one, where Llama has several."""


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


def phi_names(config: TextConfig) -> Names:
    """Llama's, with one projection to queries, keys and values, and one to gate and up."""
    return {
        **llama_names(config),
        "decoder.blocks.{i}.attention.qkv": _QKV,
        "decoder.blocks.{i}.mlp.up": _GATE_UP,
    }


def gemma_names(config: TextConfig) -> Names:
    """Llama's, with a norm after each part."""
    here, block = "model.layers.{i}.", "decoder.blocks.{i}."
    return {
        **llama_names(config),
        block + "branch1.norm": _one(here + "post_attention_layernorm"),
        block + "norm2": _one(here + "pre_feedforward_layernorm"),
        block + "branch2.norm": _one(here + "post_feedforward_layernorm"),
    }


def olmo_names(config: TextConfig) -> Names:
    """Llama's, whose norms are behind the parts."""
    here, block = "model.layers.{i}.", "decoder.blocks.{i}."
    return {
        **llama_names(config),
        block + "branch1.norm": _one(here + "post_attention_layernorm"),
        block + "branch2.norm": _one(here + "post_feedforward_layernorm"),
    }


def glm_names(config: TextConfig) -> Names:
    """Llama's, with one projection to gate and up."""
    return {**llama_names(config), "decoder.blocks.{i}.mlp.up": _GATE_UP}


def glm4_names(config: TextConfig) -> Names:
    """GLM's, with a norm after each part."""
    here, block = "model.layers.{i}.", "decoder.blocks.{i}."
    return {
        **glm_names(config),
        block + "branch1.norm": _one(here + "post_self_attn_layernorm"),
        block + "branch2.norm": _one(here + "post_mlp_layernorm"),
    }


def mixtral_names(config: TextConfig) -> Names:
    here = "model.layers.{i}.block_sparse_moe."
    return {**llama_names(config), **_mixtures(config, "decoder", here, "gate", "{e}", ("w1", "w3"), "w2")}


def qwen_moe_names(config: TextConfig) -> Names:
    up = ("gate_proj", "up_proj")
    here = "model.layers.{i}.mlp."
    return {**llama_names(config), **_mixtures(config, "decoder", here, "gate", "{e}", up, "down_proj")}


def gpt_oss_names(config: TextConfig) -> Names:
    """Llama's, with sinks, and the experts of a block in one parameter."""
    here, block = "model.layers.{i}.", "decoder.blocks.{i}."
    experts = here + "mlp.experts."
    return {
        **llama_names(config),
        block + "attention.sinks.weight": _one(here + "self_attn.sinks"),
        block + "mlp.router": _one(here + "mlp.router"),
        block + "mlp.up.weight": _one(experts + "gate_up_proj", form="turns", transposed=True),
        block + "mlp.up.bias": _one(experts + "gate_up_proj_bias", form="turns"),
        block + "mlp.down.weight": _one(experts + "down_proj", transposed=True),
        block + "mlp.down.bias": _one(experts + "down_proj_bias"),
    }


def deepseek_names(config: TextConfig) -> Names:
    """Qwen's mixtures with experts that every token visits, and attention with latents."""
    here, block, latent = "model.layers.{i}.", "decoder.blocks.{i}.", stack_of(config, "decoder").latent
    shared, ranked = here + "mlp.shared_experts.", latent is not None and latent.query_rank
    parts = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj" if ranked else "q_proj"}
    parts |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    return {
        **qwen_moe_names(config),
        **{f"{block}attention.{part}": _one(f"{here}self_attn.{name}") for part, name in parts.items()},
        block + "mlp.shared.up": WeightPlaces((shared + "gate_proj", shared + "up_proj"), "rows"),
        block + "mlp.shared.down": _one(shared + "down_proj"),
        block + "mlp.correction": _one(here + "mlp.gate.e_score_correction_bias", form="units"),
    }


def _mixtures(
    config: TextConfig, side: str, place: str, router: str, expert: str, up: tuple[str, ...], down: str
) -> dict[str, WeightPlaces]:
    """The mixtures of a stack, at `place` in blocks that have them, as they are stored."""
    table = {}
    for number, layer in enumerate(stack_of(config, side).layers):
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
        ("encoder", 1, stack_of(config, "encoder")),
        ("decoder", 2, stack_of(config, "decoder")),
    ):
        prefix, here = f"{side}.blocks.{{i}}.", f"{side}.block.{{i}}."
        first, dense = here + "layer.0.", f"{here}layer.{last}.{perceptron}."
        up = (
            WeightPlaces((dense + "wi_0", dense + "wi_1"), "rows")
            if mlp.layers[0].perceptron.gated
            else _one(dense + "wi")
        )
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
        "head.bias": _one("final_logits_bias", shape=(1, -1)),
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


def stack_of(config: TextConfig | ViTConfig, name: str) -> Stack:
    """The stack of a model by its name: `encoder` or `decoder`."""
    stack: Stack = getattr(config, name) if isinstance(config, Seq2SeqConfig) else config
    return stack
