"""Files of weights, and the index of several."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree

_INDEX = "model.safetensors.index.json"


@functools.cache
def _seeds() -> dict[str, bytes]:
    import torch
    from safetensors.torch import save

    one = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
    two = {"d.weight": torch.zeros(2, 0, 3), "e": torch.tensor([True, False])}
    names = {**dict.fromkeys(one, "one.safetensors"), **dict.fromkeys(two, "two.safetensors")}
    return {
        "one.safetensors": save(one, {"format": "pt"}),
        "two.safetensors": save(two),
        _INDEX: json.dumps({"metadata": {"total_size": 42}, "weight_map": names}).encode(),
    }


def _enter(name: str, data: bytes) -> None:
    """A folder of two files and their index, one of which is the case; then that file alone."""
    from penstock.models.convert.files import described, read_state_dict

    folder = Path("folder")
    folder.mkdir(exist_ok=True)
    for other, content in _seeds().items():
        (folder / other).write_bytes(data if other == name else content)
    for path in (folder, folder / "one.safetensors", folder / "two.safetensors"):
        foreseen = described(path)
        for key, tensor in read_state_dict(path).items():
            assert (tensor.shape, tensor.dtype) == (foreseen[key].shape, foreseen[key].dtype)


def _file(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_and_data(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The parts of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def altered_file(content: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file with another header of the right length."""
    header, data = header_and_data(content)
    return st.builds(_file, altered_tree(header), st.just(data))


def _made() -> st.SearchStrategy[Case]:
    files = {name: content for name, content in _seeds().items() if name != _INDEX}
    index = altered_tree(json.loads(_seeds()[_INDEX])).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(
        *(st.tuples(st.just(name), altered_file(content)) for name, content in files.items()),
        st.tuples(st.just(_INDEX), index),
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(b'"F8_E4M3"', b'"I8"', b'"data_offsets"', b'"shape":[', b".safetensors", b"..", b"__metadata__"),
)
