"""Folders of a ViT: its configuration, and its weights in the names of transformers, and in our own."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.door_tensors import altered_file
from fuzz.mutate import altered_tree

_NAMES = ("config.json", "model.safetensors")


@functools.cache
def _models() -> dict[str, bytes]:
    from penstock.config.model import ViTConfig

    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "width": 8,
        "depth": 2,
        "heads": 2,
        "mlp_width": 16,
        "classes": 3,
    }
    own = {"classifier": "pooled", "qk_norm": True, "stem": "conv"}
    return folders({"hf": ViTConfig(**sizes), "own": ViTConfig(**sizes, **own)})  # type: ignore[arg-type]


def folders(models: dict[str, Any]) -> dict[str, bytes]:
    """The files of a folder per model, by `KIND/NAME`, from configurations by kind."""
    import torch

    from penstock.models import create
    from penstock.models.convert import save_pretrained

    found = {}
    for kind, config in models.items():
        torch.manual_seed(0)
        save_pretrained(create(config), kind)  # type: ignore[arg-type]
        found |= {f"{kind}/{name}": Path(kind, name).read_bytes() for name in _NAMES}
        shutil.rmtree(kind)
    return found


def door(seeds: Callable[[], dict[str, bytes]], *tokens: bytes) -> Door:
    """A door for folders of which one file is changed."""

    def enter(name: str, data: bytes) -> None:
        from penstock.models.convert import from_pretrained

        kind = name.partition("/")[0]
        Path(kind).mkdir(exist_ok=True)
        for other in _NAMES:
            Path(kind, other).write_bytes(data if name == f"{kind}/{other}" else seeds()[f"{kind}/{other}"])
        from_pretrained(kind)

    def made() -> st.SearchStrategy[Case]:
        return st.one_of(
            *(
                st.tuples(
                    st.just(name),
                    altered_file(content)
                    if name.endswith(".safetensors")
                    else altered_tree(json.loads(content)).map(lambda tree: json.dumps(tree).encode()),
                )
                for name, content in seeds().items()
            )
        )

    return Door(seeds=seeds, enter=enter, made=made, tokens=tokens)


DOOR = door(
    _models, b"40000", b'"I8"', b"vit.encoder.layer.1.", b"positions", b"hidden_size", b"\x00\x00\x80\x7f"
)
