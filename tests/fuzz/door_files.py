"""The reader of files, given whatever a path may lead to."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from penstock.boundary.files import open_regular, read_text, shown

_KINDS = (
    "file",
    "empty",
    "folder",
    "fifo",
    "dangling",
    "circle",
    "zero",
    "full",
    "tty",
    "sparse",
    "locked",
    "proc",
)


def _seeds() -> dict[str, bytes]:
    return {"file": b"data.txt\nSome words.\n", "proc": b"link\n"}


def _enter(kind: str, data: bytes) -> None:
    """The first line of a case is a path below an empty folder, the rest what the file holds."""
    name, _, content = data.partition(b"\n")
    shutil.rmtree("all", ignore_errors=True)
    os.mkdir("all")
    path = b"all/" + name
    with contextlib.suppress(OSError, ValueError):  # then there is no such thing, and the reader says so
        _make(kind, path, content)
    text = os.fsdecode(path)
    read_text(text, "The file", limit=10_000)
    with open_regular(text, "The file") as file:
        file.read(100)
    shown(text)


def _make(kind: str, path: bytes, content: bytes) -> None:
    if kind in ("file", "empty", "locked"):
        Path(os.fsdecode(path)).write_bytes(b"" if kind == "empty" else content)
        if kind == "locked":
            os.chmod(path, 0)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(3 << 30)
    else:
        target = {"dangling": b"nowhere\x1b[2J", "circle": name_of(path), "zero": b"/dev/zero", "full": b"/dev/full",
                  "tty": b"/dev/tty", "proc": b"/proc/self/status"}[kind]  # fmt: skip
        os.symlink(target, path)


def name_of(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _made() -> st.SearchStrategy[Case]:
    names = st.one_of(
        st.binary(max_size=20),
        st.text(max_size=20).map(lambda text: text.encode(errors="replace")),
        st.sampled_from(
            (
                b"a",
                b"x" * 255,
                b"x" * 256,
                b"x/" * 3000,
                b"..",
                b"../..",
                b"a/b",
                b"\x1b]0;owned\x07",
                b"\xff",
            )
        ),
    )
    contents = st.one_of(st.binary(max_size=50), st.just(b"x" * 20_000))
    return st.tuples(
        st.sampled_from(_KINDS), st.builds(lambda name, rest: name + b"\n" + rest, names, contents)
    )


DOOR = Door(seeds=_seeds, enter=_enter, made=_made)
