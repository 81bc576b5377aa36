"""Tiny models for generation whose weights are large enough to prefer some tokens clearly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.families import LATENT
from penstock.config.layer import LayerSizes, Rotary
from penstock.config.model import PRESETS, Seq2SeqConfig
from penstock.data.text.tokenizers import Bytes, Numbers
from penstock.decode.engine import Engine, Request
from penstock.models import create
from penstock.models.model import Model
from penstock.serve.led import Led

WORDS = 60


def logits_after(model: Model, text: Sequence[int], source: Sequence[int] = (), **given: Tensor) -> Tensor:
    """Logits of the token that follows a text, by one pass without a cache; `source` is an encoder–decoder's."""
    sides = (source, text) if model.graph.remembered else (text,)
    with torch.no_grad():
        return model(*(torch.tensor([list(side)]) for side in sides), **given)[0, -1]  # type: ignore[no-any-return]


DECODERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"kv_heads": 2},
    "qwen": {"kv_heads": 2, "qk_norm": True},
    "qwen2": {"kv_heads": 2, "qkv_bias": True},
    "alibi": {"positions": "alibi"},
    "window": {
        "depth": 4, "window": 4, "positions": "rotary", "window_base": 30.0, "global_every": 3, "first_norm": False,
    },
    "phi": {
        "kv_heads": 2,
        "rotary": Rotary(share=0.5, scaling="longrope", factor=4.0, trained=7, short=(1.3,), long=(5.0,)),
    },
    "smollm": {"depth": 4, "kv_heads": 2, "unturned_every": 2},
    "olmo": {"kv_heads": 2},
    "glm": {"kv_heads": 2},
    "gemma 2": {"depth": 4, "kv_heads": 2, "window": 4},
    "gemma": {"depth": 4, "kv_heads": 2, "window": 4},
    "gpt-oss": {"depth": 4, "kv_heads": 2, "window": 4},
    "deepseek": {"latent": LATENT, "experts": 4, "expert_width": 16, "router_groups": 2, "groups_per_token": 1},
    "mixtral": {"kv_heads": 2, "experts": 4, "experts_per_token": 2, "shared_experts": 1},
    "pair": {"experts": 2, "experts_per_token": 1},
    "sigmoid": {
        "experts": 4,
        "experts_per_token": 2,
        "expert_width": 16,
        "expert_every": 2,
        "router": "sigmoid",
    },
    "pruned": {
        "positions": "rotary",
        "unequal": (LayerSizes(heads=4, kv=2, hidden=32), LayerSizes(heads=2, kv=2, hidden=16)),
    },
}  # fmt: skip
BOTH = ("t5-tiny", "marian-tiny", "bart-tiny", "nllb-moe-tiny")
_LIKE_LLAMA = ("llama", "qwen", "qwen2", "mixtral")


def tiny(
    name: str, *, words: int = WORDS, seed: int = 0, depth: int = 2, dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Model:  # fmt: skip
    """A decoder of `DECODERS` or an encoder–decoder of `BOTH`, `depth` blocks of width 16, drawn by `seed`; with
    `changes` of its stacks.

    Where blocks differ by a pattern over depth there are four.
    """
    sizes: dict[str, Any] = {"width": 16, "heads": 4, "depth": depth, "mlp_width": 32, "head_features": None}
    base = name if name in BOTH else "llama-tiny" if name in _LIKE_LLAMA else "gpt-tiny"
    bases = {
        "gemma": "gemma3-tiny", "gemma 2": "gemma2-tiny", "phi": "phi-tiny", "gpt-oss": "gpt-oss-tiny",
        "olmo": "olmo2-tiny", "smollm": "smollm3-tiny", "glm": "glm-tiny", "deepseek": "deepseek-tiny",
    }  # fmt: skip
    base = bases.get(name, base)
    config: Any = PRESETS[base]
    if isinstance(config, Seq2SeqConfig):
        stack = replace(config.encoder, **sizes, **changes)
        config = replace(config, encoder=stack, decoder=stack, vocabulary=words)
    else:
        config = replace(config, **{**sizes, **DECODERS[name], **changes}, vocabulary=words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    # Ties would leave the choice to the order of a sum.
                    parameter.normal_(std=0.5)
    model.eval()
    assert isinstance(model, Model)
    return model


def routed(name: str) -> Model:
    """A model of which labels 0 and 2 have expert 3, and label 1 has expert 1."""
    options: dict[str, Any] = {"router": "given", "labels": 3, "expert_of": (3, 1, 3)}
    return tiny(name, seed=1, experts=4, experts_per_token=1, **options)


class Letters(Bytes):
    """A letter for each number."""

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        return [np.array([ord(letter) - 65 for letter in text], np.int32) for text in texts]

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(chr(65 + number) for number in numbers)


def served(engine: Engine | Led, requests: Sequence[Request], late: int = 0) -> list[tuple[list[int], str]]:
    """What an engine makes of requests, of which all but `late` come at once and wait for slots."""
    waiting = list(enumerate(requests))
    running: dict[int, int] = {}
    found: list[Any] = [([], "") for _ in requests]
    step = 0
    while waiting or running:
        while waiting and (len(waiting) > late or step % 3 == 0):
            slot = engine.admit(waiting[0][1])
            if slot is None:
                break
            running[slot] = waiting.pop(0)[0]
        for slot, tokens, finished, _ in engine.step():
            found[running[slot]][0].extend(tokens)
            if finished:
                found[running[slot]] = (found[running[slot]][0], finished)
                engine.release(slot)
                del running[slot]
        step += 1
    return found
