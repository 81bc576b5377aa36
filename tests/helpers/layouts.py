"""Small models of every family for the sweep over layouts: `LAYOUT_CASES` enrols each by one line.

Sizes are such that 2 ranks can split every layer, and can share out neither tokens nor vocabulary evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from helpers import foreign
from helpers.families import LATENT, batches, loss, small
from penstock.config.layer import Rotary
from penstock.config.model import ModelConfig, Seq2SeqConfig, ViTConfig
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.tasks import Loss


class Case(NamedTuple):
    """A model, what it is trained on, and the loss."""

    make: Callable[[], nn.Module]
    batches: Callable[[int, int], Any]
    loss: Loss
    config: ModelConfig | None = None


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, made inside the model, and the number of targets."""
    *arguments, targets = batch
    return model(*arguments, targets=targets), (targets != IGNORED).sum()


def _own(config: ModelConfig, made: Loss = loss) -> Case:
    return Case(partial(create, config), partial(batches, config), made, config)


def _wider(name: str, **changes: Any) -> ModelConfig:
    """Four heads, two of keys where they are shared."""
    config: Any = small(name, **changes)
    if isinstance(config, Seq2SeqConfig):
        sides = {
            side: replace(getattr(config, side), heads=4, head_features=4) for side in ("encoder", "decoder")
        }
        made: ModelConfig = replace(config, **sides)
        return made
    more = {"kv_heads": 2} if config.kv_heads else {}
    found: ModelConfig = replace(config, heads=4, **more)
    return found


_VIT = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=4, mlp_width=32, classes=5, qkv_bias=False
)  # fmt: skip


def _foreign(name: str, **changes: Any) -> Case:
    make = partial(foreign.create, name, **changes)
    return Case(make, partial(foreign.batches, name), foreign.loss)


LAYOUT_CASES: dict[str, Case] = {
    "vit of tokens": _own(replace(_VIT, classifier="token")), "vit pooled": _own(replace(_VIT, classifier="pooled")),
    "dinov3": _own(replace(_VIT, registers=3, class_token=True, positions="axial", key_bias=False)),
    "siglip": _own(replace(_VIT, classifier="attention")),
    "dinov2": _own(replace(_VIT, classifier="both", registers=3, layer_scale=0.5)),
    "gpt": _own(_wider("gpt-tiny"), summed), "gpt of logits": _own(_wider("gpt-tiny")),
    "gpt with alibi": _own(_wider("gpt-tiny", positions="alibi"), summed),
    "llama": _own(_wider("llama-tiny"), summed), "gemma": _own(_wider("gemma3-tiny"), summed),
    "olmo": _own(_wider("olmo2-tiny"), summed), "smollm": _own(_wider("smollm3-tiny", unturned_every=2), summed),
    "glm": _own(_wider("glm-tiny"), summed), "gemma 2": _own(_wider("gemma2-tiny"), summed),
    "phi": _own(_wider("phi-tiny", rotary=Rotary(share=0.5)), summed),
    "gpt-oss": _own(_wider("gpt-oss-tiny"), summed),
    "deepseek": _own(_wider("deepseek-tiny", expert_width=16, latent=LATENT, bias_rate=0.0), summed),
    "bert": _own(_wider("bert-tiny"), summed),
    "bert of classes": _own(_wider("bert-tiny", head="classes", classes=3)),
    "modernbert": _own(_wider("modernbert-tiny"), summed),
    "modernbert of classes": _own(_wider("modernbert-tiny", head="classes", classes=3)),
    "t5": _own(_wider("t5-tiny"), summed), "marian": _own(_wider("marian-tiny"), summed),
    "bart": _own(_wider("bart-tiny"), summed),
    "transformers' llama": _foreign("llama", num_attention_heads=4, num_key_value_heads=2),
    "transformers' gpt2": _foreign("gpt2", n_head=4), "transformers' bert": _foreign("bert", num_attention_heads=4),
    "transformers' t5": _foreign("t5", num_heads=4, d_kv=4),
    "transformers' vit": _foreign("vit", num_attention_heads=4),
    "transformers' qwen3": _foreign("qwen3", num_attention_heads=4, num_key_value_heads=2),
    "transformers' gated t5": _foreign("t5", num_heads=4, d_kv=4, feed_forward_proj="gated-gelu"),
    "transformers' bart": _foreign("bart", encoder_attention_heads=4, decoder_attention_heads=4),
    "transformers' marian": _foreign("marian", encoder_attention_heads=4, decoder_attention_heads=4),
}  # fmt: skip
