"""timm's VisionTransformer, and its VisionTransformerDistilled."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from penstock.config.plan import AttentionBackend
from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, Family, Stack, enrol, numbered, pruned, stack
from penstock.models.roles import (
    Attention,
    Dropout,
    Embedding,
    Head,
    Linear,
    Norm,
    Perceptron,
    Pooler,
    Scale,
    Stem,
)


def vit_stack(names: Collection[str], heads: int, *, gated: bool = False) -> Stack:
    """All parts that a VisionTransformer with the blocks in `names` may have. `gated`: its perceptrons have a gate,
    fused with the up projection.
    """
    # Linears around a norm over the features of all heads, or over the hidden features, cannot be split.
    joined = any(".attn.norm." in name for name in names)
    hidden = any(".mlp.norm." in name for name in names)
    attention = Attention(
        "attn", projections=(Linear("attn.qkv", "none" if joined else "column", fused=(1, 1, 1)),),
        out=Linear("attn.proj", "none" if joined else "row"), heads=heads, kv_heads=heads,
        norms=(Norm("attn.q_norm"), Norm("attn.k_norm"), Norm("attn.norm")), counts=("num_heads", "attn_dim"),
    )  # fmt: skip
    perceptron = Perceptron(
        "mlp",
        up=Linear("mlp.fc1", "none" if hidden else "column", fused=(1, 1) if gated else (1,)),
        down=Linear("mlp.fc2", "none" if hidden else "row"),
    )
    return stack(
        numbered(names, r"blocks\.(\d+)"),
        (
            Norm("norm1"), attention, Dropout("attn.attn_drop"), Dropout("attn.proj_drop"),
            Scale("ls1.gamma"), Dropout("drop_path1"),
            Norm("norm2"), perceptron, Norm("mlp.norm"), Dropout("mlp.drop1"), Dropout("mlp.drop2"),
            Scale("ls2.gamma"), Dropout("drop_path2"),
        ),
        before=(
            Stem("patch_embed.proj"), Norm("patch_embed.norm"), Embedding("cls_token", "class"),
            Embedding("dist_token", "class"), Embedding("reg_token", "register"), Embedding("pos_embed", "position"),
            Norm("norm_pre"),
        ),
        after=(Norm("norm"), Pooler("attn_pool"), Norm("fc_norm"), Head("head"), Head("head_dist")),
    )  # fmt: skip


def _anatomy(model: nn.Module) -> Anatomy:
    blocks: Any = model.get_submodule("blocks")
    names = {name for name, _ in model.named_parameters()}
    # Modules without parameters have a role only if they draw random numbers.
    names |= {name for name, _ in model.named_modules() if "drop" in name}
    mlp = blocks[0].mlp
    gated = mlp.fc1.out_features == 2 * mlp.fc2.in_features
    declared = vit_stack(names, blocks[0].attn.num_heads, gated=gated)
    return Anatomy(family="timm_vit", stacks=(pruned(declared, names),))


def _set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Set `fused_attn` in each attention module, by which timm chooses between its two forms of attention."""
    if backend not in ("plain", "sdpa"):
        raise ConfigError(
            f"timm's VisionTransformer computes attention plainly or through torch's SDPA, so plan.attention "
            f"{backend!r} cannot be applied to it; use plain or sdpa, or load its weights into Penstock's ViT."
        )
    for part in _anatomy(model).parts(Attention):
        attention = model.get_submodule(part.name)
        if not hasattr(attention, "fused_attn"):
            raise ConfigError(
                f"{part.name} is a {type(attention).__qualname__} without `fused_attn`, so plan.attention "
                f"{backend!r} cannot be applied to this version of timm's VisionTransformer; leave "
                f"plan.attention at sdpa."
            )
        setattr(attention, "fused_attn", backend == "sdpa")  # noqa: B010 (a plain assignment does not type-check)


enrol(
    "timm.models.vision_transformer.VisionTransformer",
    Family(anatomy=_anatomy, switches={"attention": _set_attention}),
)
