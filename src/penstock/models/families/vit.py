"""Penstock's own Vision Transformer."""

from __future__ import annotations

from torch import nn

from penstock.config.plan import AttentionBackend, Layout
from penstock.models.anatomy import Anatomy, Family
from penstock.models.vit import ViT


def _vit(model: nn.Module) -> ViT:
    assert isinstance(model, ViT)
    return model


def _anatomy(model: nn.Module) -> Anatomy:
    config = _vit(model).config
    norms: tuple[str, ...] = ("norm1", "norm2")
    if config.qk_norm:
        norms += ("attention.q_norm", "attention.k_norm")
    dropouts: tuple[str, ...] = ()
    if config.dropout or config.drop_path:
        dropouts = ("branch1", "branch2") + (("mlp.dropout",) if config.dropout else ())
    return Anatomy(
        family="vit",
        blocks=tuple(f"blocks.{i}" for i in range(config.depth)),
        stem=("stem",),
        embeddings=("positions",) + (("class_token",) if config.classifier == "token" else ()),
        final_norms=("norm",),
        head=("head",),
        norms=norms,
        attention=("attention",),
        mlp=("mlp",),
        column_parallel=("attention.qkv", "mlp.up"),
        row_parallel=("attention.out", "mlp.down"),
        qkv_by_head=True,
        dropouts=dropouts,
    )


def _set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    _vit(model).set_attention(backend)


def _set_layout(model: nn.Module, layout: Layout) -> None:
    _vit(model).set_layout(layout)


FAMILIES = {
    "penstock.models.vit.ViT": Family(anatomy=_anatomy, set_attention=_set_attention, set_layout=_set_layout)
}
