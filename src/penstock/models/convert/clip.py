"""The two towers of transformers' CLIP (Radford et al., ICML 2021, "Learning Transferable Visual Models From Natural
Language Supervision"), in the names of a run over images and of one over texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.config.graph import Input, PatchInput
from penstock.config.theirs.libraries import ACTIVATIONS
from penstock.config.theirs.read import read_json
from penstock.errors import ConfigError
from penstock.models.convert.files import read_state_dict

_KINDS = ("clip", "clip_vision_model", "clip_text_model")
_USUAL: dict[str, dict[str, Any]] = {
    "vision": {"num_attention_heads": 12, "num_hidden_layers": 12},
    "text": {"num_attention_heads": 8, "num_hidden_layers": 12},
}
"""transformers' defaults, which a config.json leaves out."""
_BLOCK = {
    "norm1": "layer_norm1", "attention.out": "self_attn.out_proj", "norm2": "layer_norm2", "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}  # fmt: skip


class Tower(NamedTuple):
    """The weights of one side of a CLIP, and what its shapes do not tell."""

    state: dict[str, Tensor]
    """Weights of the run by their names in it; those of its input begin with `input.`."""
    head: dict[str, Tensor]
    """The projection (E, D), `weight`, and the logarithm of the factor (1,), `learned`; empty without a projection."""
    sizes: dict[str, Any]
    """Fields that its `Stack` must have."""
    causal: bool


def tower_in(folder: Path, one: Input) -> Tower | None:
    """The tower over inputs of the same kind, in a folder that transformers wrote; None for one of another model.

    Raises ConfigError for a CLIP without that tower, and CheckpointError for broken files.
    """
    file = folder / "config.json"
    values = read_json(file) if file.is_file() else {}
    if values.get("model_type") not in _KINDS:
        return None
    side = "vision" if isinstance(one, PatchInput) else "text"
    inner = values.get(f"{side}_config") if values["model_type"] == "clip" else values
    options = _USUAL[side] | (inner if isinstance(inner, dict) else {})
    state = read_state_dict(folder)
    prefix, whole = f"{side}_model.", values["model_type"] == "clip"
    # transformers 5 writes a tower alone without the prefix.
    there = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) or not whole
    }
    if not whole and values["model_type"] != f"clip_{side}_model":
        there = {}
    activation = options.get("hidden_act", "quick_gelu")
    if not there or activation not in ACTIVATIONS:
        lacking = (
            f"no {side}_model"
            if not there
            else f"the activation {str(activation)[:40]!r}, which no stack has"
        )
        raise ConfigError(f"The CLIP in {folder} has {lacking}; name another folder.")
    heads, depth = options["num_attention_heads"], options["num_hidden_layers"]
    weights = _ends(there, side)
    for number in range(depth):
        old, new = f"encoder.layers.{number}.", f"blocks.{number}."
        for kind in ("weight", "bias"):
            weights |= {
                f"{new}{name}.{kind}": there.get(f"{old}{place}.{kind}") for name, place in _BLOCK.items()
            }
            parts = [there.get(f"{old}self_attn.{which}_proj.{kind}") for which in "qkv"]
            weights[f"{new}attention.qkv.{kind}"] = _by_head(
                [part for part in parts if part is not None], heads
            )
    head = {"weight": state.get("visual_projection.weight" if side == "vision" else "text_projection.weight")}
    if head["weight"] is not None:
        head["learned"] = state.get("logit_scale", torch.tensor(math.log(1 / 0.07))).reshape(1)
    sizes = {"heads": heads, "mlp": ACTIVATIONS[activation], "norm_eps": options.get("layer_norm_eps", 1e-5)}
    sizes |= {"norm_first": True, "norm": "layer", "positions": "learned"}
    return Tower(_there(weights), _there(head), sizes, causal=side == "text")


def _ends(there: dict[str, Tensor], side: str) -> dict[str, Tensor | None]:
    """The weights before the first block and behind the last."""
    last = "post_layernorm" if side == "vision" else "final_layer_norm"
    state = {f"norm.{kind}": there.get(f"{last}.{kind}") for kind in ("weight", "bias")}
    state["places.weight"] = there.get("embeddings.position_embedding.weight")
    if side == "text":
        return state | {"input.weight": there.get("embeddings.token_embedding.weight")}
    state |= {f"embedding_norm.{kind}": there.get(f"pre_layrnorm.{kind}") for kind in ("weight", "bias")}
    state["class_token"] = there.get("embeddings.class_embedding")
    patches = there.get("embeddings.patch_embedding.weight")
    if patches is not None:  # a convolution without a bias
        state |= {"input.proj.weight": patches.flatten(1), "input.proj.bias": patches.new_zeros(len(patches))}
    return state


def _by_head(parts: list[Tensor], heads: int) -> Tensor | None:
    """Rows of queries, keys and values in our order, (head, {q, k, v}, K); None unless all three are there."""
    if len(parts) < 3 or any(len(part) % heads for part in parts):
        return None
    return torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)


def _there(weights: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if value is not None}
