"""Penstock's own models: the parts of the one block, and what each family puts around its blocks."""

from __future__ import annotations

from typing import Any

from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, ViTConfig, stacks
from penstock.config.stack import Layer
from penstock.config.stack import Stack as Sizes
from penstock.models.anatomy import Anatomy, Block, Family, Stack, Switches, enrol
from penstock.models.base import Switched
from penstock.models.context import share_tokens
from penstock.models.roles import (
    Attention,
    Dropout,
    Embedding,
    Head,
    Linear,
    Norm,
    Perceptron,
    Pooler,
    Role,
    Scale,
    Stem,
    placed,
)
from penstock.models.stack import TextModel, TokenStack


def vit_anatomy(config: ViTConfig) -> Anatomy:
    """The parts of `ViT(config)`."""
    token = (Embedding("class_token", "class"),) if config.classifier == "token" else ()
    stem = Stem("stem.proj" if config.stem == "patchify" else "stem")
    branch = (
        *((Scale("{}.scale"),) if config.layer_scale is not None else ()),
        *((Dropout("{}"),) if config.dropout or config.drop_path else ()),
    )
    whole = Stack(
        before=(stem, Embedding("positions", "position"), *token),
        blocks=_blocks("blocks", config, branch),
        after=(Norm("norm"), Head("head")),
    )
    return Anatomy(family="vit", stacks=(whole,))


def text_anatomy(config: DecoderConfig | EncoderConfig | Seq2SeqConfig) -> Anatomy:
    """The parts of `Decoder(config)`, `Encoder(config)` or `Seq2Seq(config)`."""
    names = ("encoder", "decoder") if isinstance(config, Seq2SeqConfig) else (config.family,)
    before: tuple[Role, ...] = (Embedding("tokens", "token"),)
    if isinstance(config, EncoderConfig) and config.token_types:
        before = (*before, Embedding("types", "segment"))
    found: list[Stack] = []
    for name, sizes in zip(names, stacks(config)):
        entrance = _entrance(config, sizes, name)
        last = (Norm(f"{name}.norm"),) if sizes.norm_first else ()
        branch = (Dropout("{}"),) if sizes.dropout else ()
        whole = Stack(
            before=(*before, *entrance),
            blocks=_blocks(f"{name}.blocks", sizes, branch, cross=bool(found)),
            after=(*last, *_exit(config)) if name == names[-1] else last,
        )
        found.append(whole)
        before = ()
    return Anatomy(family=config.family, stacks=tuple(found))


def _entrance(config: ModelConfig, sizes: Sizes, name: str) -> tuple[Role, ...]:
    """The parts of a text model's stack before its blocks, in the order in which they run."""
    assert not isinstance(config, ViTConfig)
    position = (Embedding(f"{name}.places", "position"),) if sizes.positions == "learned" else ()
    relative = (Embedding(f"{name}.relative", "relative"),) if sizes.positions == "relative" else ()
    norm = (Norm(f"{name}.embedding_norm"),) if config.embedding_norm else ()
    dropout = (Dropout(f"{name}.dropout"),) if sizes.dropout else ()
    return (*position, *relative, *norm, *dropout)


def _exit(config: ModelConfig) -> tuple[Role, ...]:
    """The parts of a text model after its last stack."""
    if not isinstance(config, EncoderConfig) or config.head == "none":
        return () if isinstance(config, EncoderConfig) else (Head("head"),)
    if config.head == "classes":
        dropout = (Dropout("dropout"),) if config.dropout else ()
        tanh = config.pooler == "tanh"
        pooler = (Pooler("pooler"),) if tanh else (Pooler("pooler.dense"), Norm("pooler.norm"))
        return (*pooler, *dropout, Head("head"))
    return (Linear("transform.dense"), Norm("transform.norm"), Head("head"))


def _blocks(prefix: str, sizes: Sizes, branch: tuple[Role, ...], *, cross: bool = False) -> tuple[Block, ...]:
    """The blocks of a stack, each of the parts that its layer has."""
    parts = {layer: _block(sizes, layer, branch, cross=cross) for layer in sizes.kinds}
    return tuple(
        Block(name := f"{prefix}.{i}", placed(parts[layer], f"{name}."))
        for i, layer in enumerate(sizes.layers)
    )


def _block(sizes: Sizes, layer: Layer, branch: tuple[Role, ...], *, cross: bool = False) -> tuple[Role, ...]:
    """The parts of `Block`. `branch` are those of a residual branch, with `{}` for its name."""

    def closed(name: str) -> tuple[Role, ...]:
        return tuple(type(part)(part.name.format(name)) for part in branch)

    # Rows of queries, keys and values are ordered by head, so that they are split as one matrix.
    inside = _attention(sizes, layer, "attention", (Linear("attention.qkv", "column"),))
    between: tuple[Role, ...] = ()
    if cross:
        projections = Linear("cross.q", "column"), Linear("cross.kv", "column")
        between = (
            Norm("cross_norm"),
            _attention(sizes, layer, "cross", projections),
            *closed("cross_branch"),
        )
    return (
        *((Norm("norm1"),) if layer.normed else ()),
        inside,
        *closed("branch1"),
        *between,
        *(() if sizes.parallel else (Norm("norm2"),)),
        Perceptron(
            "mlp",
            up=Linear("mlp.up", "column", fused=(1, 1) if sizes.gated else (1,)),
            down=Linear("mlp.down", "row"),
        ),
        *((Dropout("mlp.dropout"),) if sizes.hidden_dropout else ()),
        *closed("branch2"),
    )


def _attention(sizes: Sizes, layer: Layer, name: str, projections: tuple[Linear, ...]) -> Attention:
    return Attention(
        name,
        projections=projections,
        out=Linear(f"{name}.out", "row"),
        heads=layer.heads,
        kv_heads=layer.kv,
        norms=(Norm(f"{name}.q_norm"), Norm(f"{name}.k_norm")) if sizes.qk_norm else (),
        cross=len(projections) == 2,
    )


def _anatomy(model: Any) -> Anatomy:
    config = model.config
    return vit_anatomy(config) if isinstance(config, ViTConfig) else text_anatomy(config)


def _recompute_scores(model: Any, name: str) -> None:
    block: Any = model.get_submodule(name)
    for part in (block.attention, block.cross):
        if part is not None:
            part.scores_again = True


def _set_heads(model: Any, place: tuple[int, int]) -> None:
    index, count = place
    for module in model.modules():
        if isinstance(module, TokenStack):
            share = module.sizes.heads // count
            module.heads = slice(index * share, (index + 1) * share)


_VISION: Switches = {
    "attention": Switched.set_attention,
    "token_order": Switched.set_token_order,
    "recompute": _recompute_scores,
    "cp": share_tokens,
}
_DECODER: Switches = {**_VISION, "loss": TextModel.set_loss, "tp": _set_heads}
_ENCODER: Switches = {**_DECODER, "padding": TextModel.set_padding}
for _path, _switches in (
    ("vit.ViT", _VISION),
    ("decoder.Decoder", _DECODER),
    ("encoder.Encoder", _ENCODER),
    ("seq2seq.Seq2Seq", _ENCODER),
):
    enrol(f"penstock.models.{_path}", Family(anatomy=_anatomy, switches=_switches))
