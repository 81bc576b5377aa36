"""Broken inputs: bytes that were changed, and trees of values that mean nonsense, written as text all the same."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from fuzz.doors import Case

_NUMBERS = (
    b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967295", b"9223372036854775807", b"18446744073709551616",
    b"1e400", b"-0.0", b"NaN", b"Infinity", b"0x10", b"9" * 5000, b"null", b'""', b"[]", b"{}",
)  # fmt: skip
_BINARY = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1)
_LARGEST = 200_000
"""Bytes to which an input may grow by mutations."""


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """`data` with one to eight changes. `others` are inputs from which pieces are taken."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        _change(raw, rng, others, tokens)
        del raw[_LARGEST:]
    return bytes(raw)


def _change(raw: bytearray, rng: random.Random, others: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    at = rng.randrange(len(raw) + 1)
    end = min(len(raw), at + int(rng.expovariate(1 / 16)) + 1)
    match rng.randrange(11 if tokens else 10):
        case 0 | 1 if at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        case 2 if at < len(raw):
            raw[at] = rng.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 3:
            width = rng.choice((2, 4, 8))
            number = rng.choice(_BINARY) & ((1 << 8 * width) - 1)
            raw[at : at + width] = number.to_bytes(width, rng.choice(("big", "little")))
        case 4:
            numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", raw))
            if numbers:
                place = rng.choice(numbers)
                raw[place.start() : place.end()] = rng.choice(_NUMBERS)
        case 5:
            raw[at:at] = rng.randbytes(rng.randrange(1, 16))
        case 6:
            del raw[at:end]
        case 7:
            raw[at:at] = raw[at:end] * rng.choice((1, 2, 100, 5000))
        case 8:
            del raw[at:]
        case 9 if others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            raw[at:end] = other[start : start + rng.randrange(200)]
        case 10:
            raw[at:at] = rng.choice(tokens)


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 0.0, -0.0, 1e308, 5e-324, float("nan"),
    float("inf"), -float("inf"), "", " ", "0", "-1", "none", "NaN", "..", "/", "../../etc/passwd", "/dev/zero", "a\0b",
    "\x1b[2J", "\u202egnp", "\ud800", "x" * 5000, [], {}, [[]], [None], {"": 0},
)  # fmt: skip
"""Values that are seldom meant."""


def altered_tree(tree: Any) -> st.SearchStrategy[Any]:
    """A tree of dicts, lists and values as JSON has them, with one to four places changed: an odd value in place of
    what was there, a key or element removed, doubled, renamed, swapped with another or buried deep.
    """
    return st.builds(
        _altered, st.just(tree), st.lists(_changes, min_size=1, max_size=4), st.randoms(use_true_random=False)
    )


_values = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.sampled_from(ODD),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
_changes = st.tuples(
    st.sampled_from(("set", "set", "set", "remove", "double", "rename", "swap", "bury")), _values
)


def _altered(tree: Any, changes: list[tuple[str, Any]], rng: random.Random) -> Any:
    with deep():
        return _changed(tree, changes, rng)


def _changed(tree: Any, changes: list[tuple[str, Any]], rng: random.Random) -> Any:
    root = [copy.deepcopy(tree)]
    for kind, value in changes:
        places = list(_places(root))
        holder, key = rng.choice(places[1:] or places)
        if kind == "set":
            holder[key] = copy.deepcopy(value)  # or later changes would alter ODD
        elif kind == "remove" and holder is not root:
            del holder[key]
        elif kind == "double" and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif kind == "rename" and isinstance(holder, dict):
            holder[value if isinstance(value, str) else key.upper()] = holder.pop(key)
        elif kind == "swap":
            other, name = rng.choice(places)
            holder[key], value = copy.deepcopy(other[name]), holder[key]
        elif kind == "bury":
            for _ in range(rng.choice((1, 70, 3000))):
                holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    return root[0] if root else None


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a tree, down to a reasonable depth."""
    left = [(holder, 0)]
    while left:
        inner, depth = left.pop()
        keys = inner.keys() if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            yield inner, key
            if isinstance(inner[key], dict | list) and depth < 40:
                left.append((inner[key], depth + 1))


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Let Python's own functions recurse into trees that are thousands of levels deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def as_json(tree: Any) -> bytes:
    """JSON with NaN, Infinity and half characters, of any depth."""
    with deep():
        return json.dumps(tree).encode()


def as_toml(tree: Any) -> bytes:
    """TOML with a line for each entry, in which inner tables stand in braces."""
    if not isinstance(tree, dict):
        return as_json(tree)
    with deep():
        return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items()).encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return '"none"' if value is None else json.dumps(value)


def altered_trees(
    *ways: tuple[str, Any] | tuple[str, Any, Callable[[Any], bytes]],
) -> st.SearchStrategy[Case]:
    """A case of one of some named trees, changed, and written as JSON or as `ways` say."""
    return st.one_of(
        altered_tree(tree).map(lambda tree, name=name, write=write: (name, (write or [as_json])[0](tree)))
        for name, tree, *write in ways
    )


def altered_files(files: Mapping[str, bytes]) -> st.SearchStrategy[Case]:
    """A case of one of the JSON and safetensors files: another tree, or another header of the right length."""

    def altered(data: bytes) -> st.SearchStrategy[bytes]:
        if data[:1] in b"{[":
            return altered_tree(json.loads(data)).map(as_json)
        (length,) = struct.unpack("<Q", data[:8])
        return altered_tree(json.loads(data[8 : 8 + length])).map(
            lambda header: (lambda text: struct.pack("<Q", len(text)) + text + data[8 + length :])(
                as_json(header)
            )
        )

    return st.one_of(
        st.tuples(st.just(name), altered(data))
        for name, data in files.items()
        if name.endswith((".json", ".safetensors"))
    )
