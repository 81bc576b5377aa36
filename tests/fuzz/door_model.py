"""Folders of a model: its configuration, and its weights in the names of transformers, and in our own."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.door_tensors import altered_file
from fuzz.mutate import altered_tree

_NAMES = ("config.json", "model.safetensors")


@functools.cache
def _seeds() -> dict[str, bytes]:
    import torch

    from penstock.config.model import ViTConfig
    from penstock.models import ViT
    from penstock.models.convert import save_pretrained

    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "width": 8,
        "depth": 2,
        "heads": 2,
        "mlp_width": 16,
        "classes": 3,
    }
    found = {}
    for kind, more in {"hf": {}, "own": {"classifier": "pooled", "qk_norm": True, "stem": "conv"}}.items():
        torch.manual_seed(0)
        save_pretrained(ViT(ViTConfig(**sizes, **more)), kind)  # type: ignore[arg-type]
        found |= {f"{kind}/{name}": Path(kind, name).read_bytes() for name in _NAMES}
        shutil.rmtree(kind)
    return found


def _enter(name: str, data: bytes) -> None:
    from penstock.models.convert import from_pretrained

    kind = name.partition("/")[0]
    Path(kind).mkdir(exist_ok=True)
    for other in _NAMES:
        Path(kind, other).write_bytes(data if name == f"{kind}/{other}" else _seeds()[f"{kind}/{other}"])
    from_pretrained(kind)


def _made() -> st.SearchStrategy[Case]:
    return st.one_of(
        *(
            st.tuples(
                st.just(name),
                altered_file(content)
                if name.endswith(".safetensors")
                else altered_tree(json.loads(content)).map(lambda tree: json.dumps(tree).encode()),
            )
            for name, content in _seeds().items()
        )
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(b"40000", b'"I8"', b"vit.encoder.layer.1.", b"positions", b"hidden_size", b"\x00\x00\x80\x7f"),
)
