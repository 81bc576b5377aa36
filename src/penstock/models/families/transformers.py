"""Models of Hugging Face transformers: ViT, GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3, BERT, RoBERTa, XLM-RoBERTa,
CamemBERT, ModernBERT, T5, mT5, BART and Marian, with any task's head. The base class of each family is enrolled, so
that all its models are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from penstock.config.plan import Padding
from penstock.errors import ConfigError
from penstock.models.anatomy import (
    Anatomy,
    Family,
    Stack,
    Switches,
    anatomy_of,
    enrol,
    numbered,
    pruned,
    stack,
)
from penstock.models.families import transformers_switches as switches
from penstock.models.roles import (
    Attention,
    Dropout,
    Embedding,
    Experts,
    Head,
    Linear,
    Norm,
    Perceptron,
    Pooler,
    Role,
    Split,
    Stem,
    placed,
)

Stacks = tuple[Stack, ...]


def _attention(
    name: str, inner: Sequence[str], out: str, heads: int, *, kv_heads: int | None = None, **more: Any
) -> Attention:
    """Attention with separate linears for queries, keys and values. `more` are other fields of the role."""
    projections = tuple(Linear(each, "column") for each in inner)
    kv_heads = heads if kv_heads is None else kv_heads
    return Attention(
        name, projections=projections, out=Linear(out, "row"), heads=heads, kv_heads=kv_heads, **more
    )


def _perceptron(name: str, up: str, down: str, gate: str | None = None) -> Perceptron:
    gated = None if gate is None else Linear(gate, "column")
    return Perceptron(name, up=Linear(up, "column"), down=Linear(down, "row"), gate=gated)


_BERT_PERCEPTRON = _perceptron("", "intermediate.dense", "output.dense")


def vit_stacks(names: Collection[str], heads: int) -> Stacks:
    """All parts that a ViTModel with the blocks in `names` may have, in the names of transformers 5 or 4."""
    if blocks := numbered(names, r"layers\.(\d+)"):
        inner, out = ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj"
        perceptron = _perceptron("mlp", "mlp.fc1", "mlp.fc2")
    else:
        blocks = numbered(names, r"encoder\.layer\.(\d+)")
        inner = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
        out, perceptron = "attention.output.dense", _BERT_PERCEPTRON
    parts = (
        Norm("layernorm_before"), _attention("attention", inner, out, heads),
        Dropout("attention.output.dropout"), Norm("layernorm_after"), perceptron, Dropout("output.dropout"),
        Dropout("dropout"),
    )  # fmt: skip
    before = (
        Stem("embeddings.patch_embeddings.projection"), Embedding("embeddings.cls_token", "class"),
        Embedding("embeddings.mask_token", "mask"), Embedding("embeddings.position_embeddings", "position"),
        Dropout("embeddings.dropout"),
    )  # fmt: skip
    return (stack(blocks, parts, before=before, after=(Norm("layernorm"), Pooler("pooler"))),)


def _gpt2(names: Collection[str], config: Any) -> Stacks:
    def linear(name: str, split: Split, fused: tuple[int, ...] = (1,)) -> Linear:
        return Linear(name, split, fused=fused, transposed=True, counts=("nf",))

    def attention(name: str, *projections: Linear) -> tuple[Role, ...]:
        role = Attention(
            name, projections=projections, out=linear(f"{name}.c_proj", "row"), heads=config.n_head,
            kv_heads=config.n_head, cross=len(projections) == 2, counts=("num_heads", "split_size"),
        )  # fmt: skip
        return (role, Dropout(f"{name}.attn_dropout"), Dropout(f"{name}.resid_dropout"))

    cross = (linear("crossattention.q_attn", "column"), linear("crossattention.c_attn", "column", (1, 1)))
    parts = (
        Norm("ln_1"), *attention("attn", linear("attn.c_attn", "column", (1, 1, 1))), Norm("ln_cross_attn"),
        *attention("crossattention", *cross), Norm("ln_2"),
        Perceptron("mlp", up=linear("mlp.c_fc", "column"), down=linear("mlp.c_proj", "row")),
        Dropout("mlp.dropout"),
    )  # fmt: skip
    before = (Embedding("wte", "token"), Embedding("wpe", "position"), Dropout("drop"))
    return (stack(numbered(names, r"h\.(\d+)"), parts, before=before, after=(Norm("ln_f"),)),)


def _llama(names: Collection[str], config: Any) -> Stacks:
    """Also Qwen, whose third version has norms of queries and keys, and Mixtral, whose blocks have experts in place of
    a perceptron.
    """
    inner = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    parts: tuple[Role, ...] = (
        Norm("input_layernorm"),
        _attention(
            "self_attn", inner, "self_attn.o_proj", config.num_attention_heads,
            kv_heads=config.num_key_value_heads, norms=(Norm("self_attn.q_norm"), Norm("self_attn.k_norm")),
        ),
        Norm("post_attention_layernorm"),
        _perceptron("mlp", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
        Experts(
            "mlp", router=Linear("mlp.gate"), count=getattr(config, "num_local_experts", 0),
            up=Linear("mlp.experts.gate_up_proj", "column", fused=(1, 1)),
            down=Linear("mlp.experts.down_proj", "row"),
        ),
    )  # fmt: skip
    blocks, before = numbered(names, r"layers\.(\d+)"), (Embedding("embed_tokens", "token"),)
    return (stack(blocks, parts, before=before, after=(Norm("norm"),)),)


def _bert(names: Collection[str], config: Any) -> Stacks:
    def attention(name: str, *, cross: bool = False) -> tuple[Role, ...]:
        role = _attention(
            f"{name}.self", (f"{name}.self.query", f"{name}.self.key", f"{name}.self.value"),
            f"{name}.output.dense", config.num_attention_heads, cross=cross,
            counts=("num_attention_heads", "all_head_size"),
        )  # fmt: skip
        dropouts = (Dropout(f"{name}.self.dropout"), Dropout(f"{name}.output.dropout"))
        return (role, *dropouts, Norm(f"{name}.output.LayerNorm"))

    parts = (
        *attention("attention"), *attention("crossattention", cross=True), _BERT_PERCEPTRON,
        Dropout("output.dropout"), Norm("output.LayerNorm"),
    )  # fmt: skip
    before = (
        Embedding("embeddings.word_embeddings", "token"),
        Embedding("embeddings.token_type_embeddings", "segment"),
        Embedding("embeddings.position_embeddings", "position"),
        Norm("embeddings.LayerNorm"),
        Dropout("embeddings.dropout"),
    )
    blocks = numbered(names, r"encoder\.layer\.(\d+)")
    return (stack(blocks, parts, before=before, after=(Pooler("pooler"),)),)


def _modernbert(names: Collection[str], config: Any) -> Stacks:
    """The first block has no norm before its attention."""
    attention = Attention(
        "attn", projections=(Linear("attn.Wqkv", "column", fused=(1, 1, 1)),), out=Linear("attn.Wo", "row"),
        heads=config.num_attention_heads, kv_heads=config.num_attention_heads,
    )  # fmt: skip
    perceptron = Perceptron("mlp", up=Linear("mlp.Wi", "column", fused=(1, 1)), down=Linear("mlp.Wo", "row"))
    parts = (
        Norm("attn_norm"), attention, Dropout("attn.out_drop"), Norm("mlp_norm"), perceptron,
        Dropout("mlp.drop"),
    )  # fmt: skip
    before = (
        Embedding("embeddings.tok_embeddings", "token"), Norm("embeddings.norm"), Dropout("embeddings.drop"),
    )  # fmt: skip
    blocks = numbered(names, r"layers\.(\d+)")
    return (stack(blocks, parts, before=before, after=(Norm("final_norm"),)),)


def _t5(names: Collection[str], config: Any) -> Stacks:
    def attention(layer: str, name: str, *, cross: bool = False) -> tuple[Role, ...]:
        name = f"{layer}.{name}"
        role = _attention(
            name, (f"{name}.q", f"{name}.k", f"{name}.v"), f"{name}.o", config.num_heads,
            relative=Embedding(f"{name}.relative_attention_bias", "relative"), cross=cross,
            counts=("n_heads", "inner_dim"),
        )  # fmt: skip
        return (Norm(f"{layer}.layer_norm"), role, Dropout(f"{layer}.dropout"))

    def perceptron(layer: str) -> tuple[Role, ...]:
        name = f"{layer}.DenseReluDense"
        gated = _perceptron(name, f"{name}.wi_1", f"{name}.wo", f"{name}.wi_0")
        plain = _perceptron(name, f"{name}.wi", f"{name}.wo")
        dropouts = (Dropout(f"{name}.dropout"), Dropout(f"{layer}.dropout"))
        return (Norm(f"{layer}.layer_norm"), gated, plain, *dropouts)

    def side(name: str, parts: tuple[Role, ...], before: tuple[Role, ...], after: tuple[Role, ...]) -> Stack:
        return stack(
            numbered(names, rf"{name}\.block\.(\d+)"),
            parts,
            before=(*before, Embedding(f"{name}.embed_tokens", "token"), Dropout(f"{name}.dropout")),
            after=(Norm(f"{name}.final_layer_norm"), *after),
        )

    first = attention("layer.0", "SelfAttention")
    cross = attention("layer.1", "EncDecAttention", cross=True)
    encoder = side("encoder", (*first, *perceptron("layer.1")), (Embedding("shared", "token"),), ())
    decoder = side("decoder", (*first, *cross, *perceptron("layer.2")), (), (Head("lm_head"),))
    return (encoder, decoder) if decoder.blocks else (encoder,)


def _bart(names: Collection[str], config: Any) -> Stacks:
    """Also Marian, whose positions are computed, though they are stored in a table."""

    def attention(name: str, norm: str, heads: int, *, cross: bool = False) -> tuple[Role, ...]:
        inner = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        role = _attention(name, inner, f"{name}.out_proj", heads, cross=cross)
        return (role, Norm(norm))

    def side(name: str, heads: int, before: tuple[Role, ...]) -> Stack:
        other = attention("encoder_attn", "encoder_attn_layer_norm", heads, cross=True)
        parts = (
            *attention("self_attn", "self_attn_layer_norm", heads), *(other if name == "decoder" else ()),
            _perceptron("", "fc1", "fc2"), Norm("final_layer_norm"),
        )  # fmt: skip
        return stack(
            numbered(names, rf"{name}\.layers\.(\d+)"),
            parts,
            before=(
                *before,
                Embedding(f"{name}.embed_tokens", "token"),
                Embedding(f"{name}.embed_positions", "position"),
                Norm(f"{name}.layernorm_embedding"),
            ),
        )

    return (
        side("encoder", config.encoder_attention_heads, (Embedding("shared", "token"),)),
        side("decoder", config.decoder_attention_heads, ()),
    )


# Linears of a task's head that return the model's output.
_HEADS = (
    "lm_head", "decoder", "classifier", "score", "qa_outputs", "seq_relationship", "out_proj",
)  # fmt: skip


def _anatomy(family: str, stacks: Callable[[Collection[str], Any], Stacks], model: Any) -> Anatomy:
    """The base model's stacks; the parts of a task's head are appended to the last one."""
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    declared = stacks({name.removeprefix(prefix) for name in names}, model.config)
    inside = Anatomy(family=family, stacks=pruned(placed(declared, prefix), names))
    *others, last = inside.stacks
    last = replace(last, after=(*last.after, *_around(model, inside)))
    return replace(inside, stacks=(*others, last))


def _around(model: nn.Module, inside: Anatomy) -> Iterator[Role]:
    """The parts outside the base model that hold parameters, in the order in which they are declared."""
    blocks = tuple(f"{block}." for block in inside.blocks)
    loose: dict[int, str] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(name, recurse=False, remove_duplicate=False):
            if own.startswith(blocks) or inside.role_of(own) is not None:
                continue
            if next(module.children(), None) is not None:
                loose[id(parameter)] = own
                continue
            if isinstance(module, nn.Linear):
                kind = Head if name.endswith(_HEADS) else Linear
                yield kind(name, bias=loose.pop(id(module.bias), None))
            else:
                yield Norm(name) if isinstance(module, nn.LayerNorm) else Role(name)
            break
    yield from (Role(name) for name in loose.values())


def _set_padding(model: nn.Module, padding: Padding) -> None:
    config: Any = model.config
    blocks = [] if config.is_decoder else [block.name for block in anatomy_of(model).stacks[0].blocks]
    if not blocks:
        raise ConfigError(
            f"plan.padding={padding} cannot be applied to {type(model).__qualname__}, which has no encoder; leave "
            "plan.padding out."
        )
    switches.set_padding(map(model.get_submodule, blocks), model, padding)


_BASES: dict[str, tuple[str, Callable[[Collection[str], Any], Stacks]]] = {
    "vit.modeling_vit.ViT": ("hf_vit", lambda names, config: vit_stacks(names, config.num_attention_heads)),
    "gpt2.modeling_gpt2.GPT2": ("hf_gpt2", _gpt2), "llama.modeling_llama.Llama": ("hf_llama", _llama),
    "mistral.modeling_mistral.Mistral": ("hf_mistral", _llama),
    "qwen2.modeling_qwen2.Qwen2": ("hf_qwen2", _llama), "qwen3.modeling_qwen3.Qwen3": ("hf_qwen3", _llama),
    "bert.modeling_bert.Bert": ("hf_bert", _bert), "roberta.modeling_roberta.Roberta": ("hf_roberta", _bert),
    "xlm_roberta.modeling_xlm_roberta.XLMRoberta": ("hf_xlm_roberta", _bert),
    "camembert.modeling_camembert.Camembert": ("hf_camembert", _bert),
    "modernbert.modeling_modernbert.ModernBert": ("hf_modernbert", _modernbert),
    "bart.modeling_bart.Bart": ("hf_bart", _bart), "marian.modeling_marian.Marian": ("hf_marian", _bart),
    "t5.modeling_t5.T5": ("hf_t5", _t5), "mt5.modeling_mt5.MT5": ("hf_mt5", _t5),
    "mixtral.modeling_mixtral.Mixtral": ("hf_mixtral", _llama),
}  # fmt: skip
_VISION: Switches = {"attention": switches.set_vit_attention, "recompute": switches.recompute_vit_scores}
_TEXT: Switches = {"loss": switches.set_loss}
_ENCODER: Switches = {**_TEXT, "padding": _set_padding}
for _path, (_name, _stacks) in _BASES.items():
    _own = _VISION if _name == "hf_vit" else _ENCODER if _stacks in (_bert, _bart) else _TEXT
    enrol(
        f"transformers.models.{_path}PreTrainedModel",
        Family(anatomy=partial(_anatomy, _name, _stacks), switches=_own),
    )
