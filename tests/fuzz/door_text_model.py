"""Folders of text models: their configuration, and their weights in the names of transformers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from fuzz.door_model import door
from penstock.config.layer import Rotary
from penstock.config.model import PRESETS

_SIZES = {"width": 8, "depth": 2, "heads": 2, "mlp_width": 16}
_TEXT: dict[str, Any] = {"vocabulary": 12, "sequence": 8}


@functools.cache
def _seeds() -> dict[str, bytes]:
    from fuzz.door_model import folders

    llama = {"kv_heads": 1, "rotary": Rotary(scaling="llama3", factor=2.0)}
    bert = {"head": "classes", "classes": 3}
    models: dict[str, Any] = {
        name: replace(PRESETS[preset], **_SIZES, **_TEXT, **more)
        for name, preset, more in (
            ("gpt2", "gpt-tiny", {}),
            ("llama", "llama-tiny", llama),
            ("bert", "bert-tiny", bert),
        )
    }
    for name, preset in {"t5": "t5-tiny", "marian": "marian-tiny"}.items():
        both = PRESETS[preset]
        sides = {side: replace(getattr(both, side), **_SIZES) for side in ("encoder", "decoder")}
        models[name] = replace(both, **sides, **_TEXT, decoder_sequence=8)
    return folders(models)


DOOR = door(
    _seeds,
    b"40000",
    b'"I8"',
    b"rope_theta",
    b'"model.layers.1.',
    b"final_logits_bias",
    b"embed_positions.weight",
    b"\x00\x00\x80\x7f",
)
