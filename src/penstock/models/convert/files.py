"""Folders and files of weights, safetensors and JSON: written whole or not at all, and nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError
from penstock.leftovers import make_public, temporary

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of a folder that holds one or an index of several, on the CPU.

    Raises ConfigError when there is none, CheckpointError when one is broken.
    """
    path = Path(path)
    if path.is_dir():
        if (path / INDEX).is_file():
            return _read_shards(path)
        path = path / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a safetensors file, or a folder with a {WEIGHTS}.")
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"{path} is no safetensors file, and only these are read, because unpickling a file can run code "
            f"in it; if you trust it, load it with torch and write it with safetensors.torch.save_file."
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}. Fetch or write it again."
        ) from error


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_json(folder / INDEX)
    shards = sorted(set(index.get("weight_map", {}).values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside or not shards:
        raise CheckpointError(
            f"{folder / INDEX} names {outside or 'no'} files, which are not in its folder. Fetch it again."
        )
    state: dict[str, Tensor] = {}
    for shard in shards:
        state |= read_state_dict(folder / shard)
    return state


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch or write it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds {type(values).__name__}, not a JSON object. Fetch or write it again."
        )
    return values


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `target`, then move it there in one step."""
    with temporary(target.parent, f".{target.name}.", folder=False) as partial:
        write(partial)
        make_public(partial)
        partial.replace(target)
