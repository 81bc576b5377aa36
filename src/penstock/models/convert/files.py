"""Reads folders and files of weights, safetensors and JSON; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.boundary.weights import DTYPES, TensorInfo, read_header, read_index
from penstock.config.theirs.read import read_json
from penstock.errors import CheckpointError, ConfigError
from penstock.tensorfile import INDEX, WEIGHTS

_BROKEN = "cannot be read as safetensors"
_REMEDY = "Fetch or write it again."
NO_ROWS: Mapping[str, Sequence[int]] = MappingProxyType({})


def read_state_dict(path: str | Path, rows: Mapping[str, Sequence[int]] = NO_ROWS) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of a folder that holds one or an index of several, on the CPU. For tensors
    named in `rows` only these rows are read, and nothing if the rows are empty.

    Raises ConfigError when there is none, CheckpointError when one is broken.
    """
    if not rows:
        return {name: tensor for file in _headers(Path(path)) for name, tensor in load_file(file).items()}
    state = {}
    for file, header in _headers(Path(path)).items():
        with safe_open(file, framework="pt") as opened:
            for name in header:
                if name in rows and not rows[name]:
                    continue
                if name in rows:
                    part = opened.get_slice(name)
                    state[name] = torch.cat([part[row : row + 1] for row in rows[name]])
                else:
                    state[name] = opened.get_tensor(name)
    return state


def described(path: str | Path) -> dict[str, Tensor]:
    """The tensors that `read_state_dict` will return, on the meta device: names, types and shapes. Only headers are
    read.
    """
    return {
        name: torch.empty(info.shape, dtype=getattr(torch, DTYPES[info.dtype][0]), device="meta")
        for header in _headers(Path(path)).values()
        for name, info in header.items()
    }


def _headers(path: Path) -> dict[Path, dict[str, TensorInfo]]:
    """The safetensors files at `path` with the content of their headers, which is checked."""
    if path.is_dir() and (path / INDEX).exists():
        places: dict[str, str] = read_index(path / INDEX, remedy=_REMEDY)["weight_map"]
        # transformers leaves the index of an earlier model that it replaces by one in a single file.
        if not (path / WEIGHTS).exists() or any((path / name).exists() for name in places.values()):
            return _of_index(path, places)
    if path.is_dir():
        path = path / WEIGHTS
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a safetensors file, or a folder with a {WEIGHTS}.")
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"{path} is no safetensors file, and only these are read, because unpickling a file can run code "
            f"in it; if you trust it, load it with torch and write it with safetensors.torch.save_file."
        )
    return {path: read_header(path, refused=_BROKEN, remedy=_REMEDY)}


def _of_index(folder: Path, places: Mapping[str, str]) -> dict[Path, dict[str, TensorInfo]]:
    headers = {
        folder / name: read_header(folder / name, refused=_BROKEN, remedy=_REMEDY)
        for name in sorted(set(places.values()))
    }
    for name, place in places.items():
        holders = [file.name for file, header in headers.items() if name in header]
        if holders != [place]:
            raise CheckpointError(
                f"{folder / INDEX} says that {place} holds {quoted(name)}, which is in {holders or 'no file'}. "
                f"{_REMEDY}"
            )
    return headers


def settings_in(source: Path) -> dict[str, Any]:
    """The content of config.json and generation_config.json in a folder of weights, or next to a file of weights. The
    latter takes precedence, because transformers uses it for generation.
    """
    folder = source if source.is_dir() else source.parent
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            settings |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    return settings


def first_token(settings: dict[str, Any]) -> int | None:
    """The token that a decoder starts with, from the result of `settings_in`."""
    start = settings.get("decoder_start_token_id")
    return start if isinstance(start, int) else None
