"""timm's VisionTransformer."""

from __future__ import annotations

from torch import nn

from penstock.config.plan import AttentionBackend
from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, Family, numbered


def _anatomy(model: nn.Module) -> Anatomy:
    names = {name for name, _ in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters()}
    blocks = numbered(model, r"blocks\.(\d+)")
    first = blocks[0]

    def present(*candidates: str) -> tuple[str, ...]:
        return tuple(c for c in candidates if _has_parameters(model, names, f"{first}.{c}"))

    return Anatomy(
        family="timm_vit",
        blocks=blocks,
        stem=("patch_embed",) + (("norm_pre",) if _has_parameters(model, names, "norm_pre") else ()),
        embeddings=tuple(p for p in ("pos_embed", "cls_token", "reg_token") if p in parameters),
        final_norms=tuple(n for n in ("norm", "fc_norm") if _has_parameters(model, names, n)),
        head=tuple(n for n in ("attn_pool", "head") if _has_parameters(model, names, n)),
        norms=present("norm1", "norm2", "attn.q_norm", "attn.k_norm", "attn.norm", "mlp.norm"),
        attention=("attn",),
        mlp=("mlp",),
        column_parallel=("attn.qkv", "mlp.fc1"),
        row_parallel=("attn.proj", "mlp.fc2"),
        dropouts=tuple(
            d
            for d in (
                "attn.attn_drop",
                "attn.proj_drop",
                "drop_path1",
                "mlp.drop1",
                "mlp.drop2",
                "drop_path2",
            )
            if f"{first}.{d}" in names
        ),
    )


def _has_parameters(model: nn.Module, names: set[str], name: str) -> bool:
    return name in names and any(True for _ in model.get_submodule(name).parameters())


def _set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """timm knows two forms, chosen by `fused_attn` in each attention module."""
    if backend not in ("plain", "sdpa"):
        raise ConfigError(
            f"timm's VisionTransformer computes attention plainly or through torch's SDPA, so plan.attention "
            f"{backend!r} cannot be applied to it; use plain or sdpa, or load its weights into Penstock's "
            f"ViT."
        )
    for name in _anatomy(model).within(("attn",)):
        attention = model.get_submodule(name)
        if not hasattr(attention, "fused_attn"):
            raise ConfigError(
                f"{name} is a {type(attention).__qualname__} without `fused_attn`, so plan.attention "
                f"{backend!r} cannot be applied to this version of timm's VisionTransformer; leave "
                f"plan.attention at sdpa."
            )
        setattr(attention, "fused_attn", backend == "sdpa")  # noqa: B010 (a plain assignment does not type-check)


FAMILIES = {
    "timm.models.vision_transformer.VisionTransformer": Family(anatomy=_anatomy, set_attention=_set_attention)
}
