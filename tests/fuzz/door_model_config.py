"""config.json of a folder of weights: transformers', and Penstock's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from fuzz.text import as_json
from penstock.config.load import to_dict
from penstock.config.model import PRESETS


def _trees() -> dict[str, dict[str, Any]]:
    from penstock.config.model import ViTConfig
    from penstock.config.theirs.vit import hf_config

    small = PRESETS["vit-digits"]
    assert isinstance(small, ViTConfig)
    theirs = hf_config(ViTConfig(width=48, depth=2, heads=3, mlp_width=96, classes=3)) | {"num_labels": 3}
    return {
        "theirs": theirs,
        "pairs": theirs | {"image_size": [96, 96], "patch_size": [8, 8], "id2label": {"0": "a", "1": "b"}},
        "images and texts": {
            "model_type": "penstock_multimodal",
            "penstock": to_dict(PRESETS["multimodal-tiny"]),
        },
        "branches": {"model_type": "penstock_universal", "penstock": to_dict(PRESETS["universal-tiny"])},
        "ours": {"model_type": "penstock_vit", "architectures": ["ViT"], "penstock": to_dict(small)},
        "images from noise": {
            "model_type": "penstock_diffusion",
            "penstock": to_dict(PRESETS["ddigits-moe-tiny"]),
        },
    }


def _enter(name: str, data: bytes) -> None:
    from penstock.models.convert.pretrained import read_config

    Path("config.json").write_bytes(data)
    config = read_config(Path())
    assert config.tokens > 0


def _made() -> st.SearchStrategy[Case]:
    return st.one_of(
        altered_tree(tree).map(lambda tree, name=name: (name, as_json(tree)))
        for name, tree in _trees().items()
    )


DOOR = Door(
    seeds=lambda: {name: json.dumps(tree).encode() for name, tree in _trees().items()},
    enter=_enter,
    made=_made,
    tokens=(b"[", b"{", b"null", b"NaN", b"\\u0000", b'"penstock": {'),
)
