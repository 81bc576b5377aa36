"""transformers' ViTModel and ViTForImageClassification, in the names of its versions 4 and 5."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from penstock.config.plan import AttentionBackend
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS, attention
from penstock.models.anatomy import Anatomy, Family, numbered


def _anatomy_of_model(model: nn.Module) -> Anatomy:
    blocks = numbered(model, r"layers\.(\d+)")
    if blocks:
        within = Anatomy(
            family="hf_vit",
            blocks=blocks,
            attention=("attention",),
            mlp=("mlp",),
            column_parallel=("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
            row_parallel=("attention.o_proj", "mlp.fc2"),
            dropouts=("dropout",),
            **_AROUND,
        )
    else:
        within = Anatomy(
            family="hf_vit",
            blocks=numbered(model, r"encoder\.layer\.(\d+)"),
            attention=("attention",),
            mlp=("intermediate", "output"),
            column_parallel=(
                "attention.attention.query",
                "attention.attention.key",
                "attention.attention.value",
                "intermediate.dense",
            ),
            row_parallel=("attention.output.dense", "output.dense"),
            dropouts=("attention.output.dropout", "output.dropout"),
            **_AROUND,
        )
    return within


_AROUND: dict[str, Any] = {
    "stem": ("embeddings.patch_embeddings",),
    "embeddings": ("embeddings.position_embeddings", "embeddings.cls_token"),
    "final_norms": ("layernorm",),
    "norms": ("layernorm_before", "layernorm_after"),
    # q, k and v are linears of their own, each ordered by head.
    "qkv_by_head": True,
}


def _anatomy(model: nn.Module) -> Anatomy:
    inner = getattr(model, "vit", None)
    if isinstance(inner, nn.Module):
        found = _anatomy_of_model(inner).prefixed("vit.")
        return replace(found, head=("classifier",))
    found = _anatomy_of_model(model)
    return replace(found, head=("pooler",)) if getattr(model, "pooler", None) is not None else found


def _set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Through transformers' own registry of attention functions, in which Penstock's are entered."""
    transformers: Any = sys.modules["transformers"]  # imported: the model is one of its classes
    # By number: transformers takes any name with "flash" in it for a package of its own to import.
    name = "sdpa" if backend == "sdpa" else f"penstock_{BACKENDS.index(backend)}"
    if backend not in BACKENDS or not hasattr(transformers, "AttentionInterface"):
        raise ConfigError(
            f"plan.attention {backend!r} cannot be applied to {type(model).__qualname__}: transformers "
            f"{transformers.__version__} has no registry of attention functions; install transformers>=4.56."
        )
    if backend != "sdpa":
        transformers.AttentionInterface.register(name, _interface(backend))
    model.set_attn_implementation(name)  # type: ignore[operator]


def _interface(backend: AttentionBackend) -> Any:
    """Penstock's attention in the form that transformers calls: out is (B, N, H, K), and no weights are
    returned.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or dropout:
            raise ConfigError(
                f"plan.attention {backend!r} takes neither a mask nor dropout of attention weights; set "
                f"attention_probs_dropout_prob to 0 and pass no attention_mask, or use plan.attention sdpa."
            )
        if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1.0) > 1e-6:
            raise ConfigError(
                f"plan.attention {backend!r} scales by 1/√{query.shape[-1]}, but got {scaling}."
            )
        return attention(query, key, value, backend).transpose(1, 2).contiguous(), None

    return forward


FAMILIES = {
    f"transformers.models.vit.modeling_vit.{name}": Family(anatomy=_anatomy, set_attention=_set_attention)
    for name in ("ViTModel", "ViTForImageClassification")
}
