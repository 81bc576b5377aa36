"""Folders of models: their configuration, and their weights in the names of transformers, and in our own."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz.doors import Door
from fuzz.mutate import altered_files, altered_trees
from penstock.config.layer import Rotary
from penstock.config.load import to_dict
from penstock.config.model import PRESETS, ViTConfig

_INDEX = "model.safetensors.index.json"
_NAMES = ("config.json", "model.safetensors")
_SIZES: dict[str, Any] = {"width": 8, "depth": 2, "heads": 2, "mlp_width": 16}
_TEXT: dict[str, Any] = {"vocabulary": 12, "sequence": 8}


@functools.cache
def _tensors() -> dict[str, bytes]:
    import torch
    from safetensors.torch import save

    one = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
    two = {"d.weight": torch.zeros(2, 0, 3), "e": torch.tensor([True, False])}
    names = {**dict.fromkeys(one, "one.safetensors"), **dict.fromkeys(two, "two.safetensors")}
    index = json.dumps({"metadata": {"total_size": 42}, "weight_map": names}).encode()
    return {"one.safetensors": save(one, {"format": "pt"}), "two.safetensors": save(two), _INDEX: index}


def _enter_tensors(name: str, data: bytes) -> None:
    """A folder of two files and their index, one of which is the case; then that file alone."""
    from penstock.models.convert.files import described, read_state_dict

    folder = Path("folder")
    folder.mkdir(exist_ok=True)
    for other, content in _tensors().items():
        (folder / other).write_bytes(data if other == name else content)
    for path in (folder, folder / "one.safetensors", folder / "two.safetensors"):
        foreseen = described(path)
        for key, tensor in read_state_dict(path).items():
            assert (tensor.shape, tensor.dtype) == (foreseen[key].shape, foreseen[key].dtype)


def _folders(models: dict[str, Any]) -> dict[str, bytes]:
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


@functools.cache
def _vits() -> dict[str, bytes]:
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3, **_SIZES}
    own = {"classifier": "pooled", "qk_norm": True, "stem": "conv"}
    return _folders({"hf": ViTConfig(**sizes), "own": ViTConfig(**sizes, **own)})  # type: ignore[arg-type]


@functools.cache
def _texts() -> dict[str, bytes]:
    llama = {"kv_heads": 1, "rotary": Rotary(scaling="llama3", factor=2.0)}
    bert = {"head": "classes", "classes": 3}
    of = {"gpt2": ("gpt-tiny", {}), "llama": ("llama-tiny", llama), "bert": ("bert-tiny", bert)}
    models: dict[str, Any] = {
        name: replace(PRESETS[preset], **_SIZES, **_TEXT, **more) for name, (preset, more) in of.items()
    }
    for name, preset in {"t5": "t5-tiny", "marian": "marian-tiny"}.items():
        both = PRESETS[preset]
        sides = {side: replace(getattr(both, side), **_SIZES) for side in ("encoder", "decoder")}
        models[name] = replace(both, **sides, **_TEXT, decoder_sequence=8)
    return _folders(models)


def _door(seeds: Callable[[], dict[str, bytes]], *tokens: bytes) -> Door:
    """A door for folders of which one file is changed."""

    def enter(name: str, data: bytes) -> None:
        from penstock.models.convert import from_pretrained

        kind = name.partition("/")[0]
        Path(kind).mkdir(exist_ok=True)
        for other in _NAMES:
            Path(kind, other).write_bytes(data if name == f"{kind}/{other}" else seeds()[f"{kind}/{other}"])
        from_pretrained(kind)

    return Door(seeds=seeds, enter=enter, made=lambda: altered_files(seeds()), tokens=tokens)


def _trees() -> dict[str, dict[str, Any]]:
    from penstock.config.theirs.backbones import hf_config

    theirs = hf_config(ViTConfig(width=48, depth=2, heads=3, mlp_width=96, classes=3)) | {"num_labels": 3}
    ours = {"multimodal": "multimodal-tiny", "universal": "universal-tiny", "vit": "vit-digits"}
    ours["diffusion"] = "ddigits-moe-tiny"
    return {
        "theirs": theirs,
        "pairs": theirs | {"image_size": [96, 96], "patch_size": [8, 8], "id2label": {"0": "a", "1": "b"}},
        **{
            kind: {
                "model_type": f"penstock_{kind}",
                "architectures": ["X"],
                "penstock": to_dict(PRESETS[preset]),
            }
            for kind, preset in ours.items()
        },
    }


def _enter_config(name: str, data: bytes) -> None:
    from penstock.models.convert.pretrained import read_config

    Path("config.json").write_bytes(data)
    assert read_config(Path()).tokens > 0


DOORS = {
    "tensors": Door(
        seeds=_tensors, enter=_enter_tensors, made=lambda: altered_files(_tensors()),
        tokens=(b'"F8_E4M3"', b'"I8"', b'"data_offsets"', b'"shape":[', b".safetensors", b"..", b"__metadata__"),
    ),
    "model": _door(
        _vits, b"40000", b'"I8"', b"vit.encoder.layer.1.", b"positions", b"hidden_size", b"\x00\x00\x80\x7f"
    ),
    "text_model": _door(
        _texts, b"40000", b'"I8"', b"rope_theta", b'"model.layers.1.', b"final_logits_bias", b"embed_positions.weight",
        b"\x00\x00\x80\x7f",
    ),
    "model_config": Door(
        seeds=lambda: {name: json.dumps(tree).encode() for name, tree in _trees().items()}, enter=_enter_config,
        made=lambda: altered_trees(*_trees().items()),
        tokens=(b"[", b"{", b"null", b"NaN", b"\\u0000", b'"penstock": {'),
    ),
}  # fmt: skip
