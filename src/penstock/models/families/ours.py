"""Penstock's own Vision Transformer."""

from __future__ import annotations

from penstock.config.model import ViTConfig
from penstock.models.anatomy import Anatomy, Family, enrol, stack
from penstock.models.roles import (
    Attention,
    Dropout,
    Embedding,
    Head,
    Linear,
    Norm,
    Perceptron,
    Role,
    Scale,
    Stem,
)
from penstock.models.vit import ViT


def vit_anatomy(config: ViTConfig) -> Anatomy:
    """The parts of `ViT(config)`."""
    norms = (Norm("attention.q_norm"), Norm("attention.k_norm")) if config.qk_norm else ()
    parts: tuple[Role, ...] = (
        Norm("norm1"),
        Attention(
            "attention",
            # Its rows are ordered by head, so it is split as one matrix.
            projections=(Linear("attention.qkv", "column"),),
            out=Linear("attention.out", "row"),
            heads=config.heads,
            kv_heads=config.heads,
            norms=norms,
        ),
        *_branch(config, "branch1"),
        Norm("norm2"),
        Perceptron("mlp", up=Linear("mlp.up", "column"), down=Linear("mlp.down", "row")),
        *((Dropout("mlp.dropout"),) if config.dropout else ()),
        *_branch(config, "branch2"),
    )
    token = (Embedding("class_token", "class"),) if config.classifier == "token" else ()
    stem = Stem("stem.proj" if config.stem == "patchify" else "stem")
    whole = stack(
        (f"blocks.{i}" for i in range(config.depth)),
        parts,
        before=(stem, Embedding("positions", "position"), *token),
        after=(Norm("norm"), Head("head")),
    )
    return Anatomy(family="vit", stacks=(whole,))


def _branch(config: ViTConfig, name: str) -> tuple[Role, ...]:
    scale = (Scale(f"{name}.scale"),) if config.layer_scale is not None else ()
    return (*scale, Dropout(name)) if config.dropout or config.drop_path else scale


enrol(
    "penstock.models.vit.ViT",
    Family(
        anatomy=lambda model: vit_anatomy(model.config),
        set_attention=ViT.set_attention,
        set_token_order=ViT.set_token_order,
    ),
)
