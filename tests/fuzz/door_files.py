"""The reader of files, given whatever a path may lead to; and tar shards, as `penstock pack` reads them."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import lzma
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.doors import Case, Door
from penstock.boundary.files import open_regular, read_text, shown
from penstock.data.tar import read_tar

_KINDS = (
    "file", "empty", "folder", "fifo", "dangling", "circle", "zero", "full", "tty", "sparse", "locked", "proc",
)  # fmt: skip


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
        target = {"dangling": b"nowhere\x1b[2J", "circle": path.rpartition(b"/")[2], "zero": b"/dev/zero",
                  "full": b"/dev/full", "tty": b"/dev/tty", "proc": b"/proc/self/status"}[kind]  # fmt: skip
        os.symlink(target, path)


def _made() -> st.SearchStrategy[Case]:
    names = st.one_of(
        st.binary(max_size=20),
        st.text(max_size=20).map(lambda text: text.encode(errors="replace")),
        st.sampled_from(
            (b"a", b"x" * 255, b"x" * 256, b"x/" * 3000, b"..", b"../..", b"a/b", b"\x1b]0;owned", b"\xff")
        ),
    )
    contents = st.one_of(st.binary(max_size=50), st.just(b"x" * 20_000))
    return st.tuples(
        st.sampled_from(_KINDS), st.builds(lambda name, rest: name + b"\n" + rest, names, contents)
    )


_PICTURE = b"\xff\xd8 not looked at here \xff\xd9"


def _tar(members: list[tuple[tarfile.TarInfo, bytes]], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as shard:
        for info, content in members:
            shard.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _member(name: str, content: bytes, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def _shards() -> dict[str, bytes]:
    folder = tarfile.TarInfo("a")
    folder.type = tarfile.DIRTYPE
    members = [
        (folder, b""),
        _member("a/1.jpg", _PICTURE),
        _member("a/1.cls", b"3"),
        _member("b.json", b'{"label": 5}'),
        _member("b.png", _PICTURE * 40),
    ]
    long = [_member("x" * 150 + "/ä.jpg", _PICTURE), _member("x" * 150 + "/ä.cls", b"2")]
    pax = _tar(long, tarfile.PAX_FORMAT)
    plain = _tar(members, tarfile.USTAR_FORMAT)[: -8 * 512]
    return {
        "ustar": plain,
        "gnu": _tar(long, tarfile.GNU_FORMAT)[: -8 * 512],
        "pax": pax[: -8 * 512],
        "gz": gzip.compress(plain, mtime=0),
        "bz2": bz2.compress(plain),
        "xz": lzma.compress(plain),
    }


def _enter_tar(name: str, data: bytes) -> None:
    Path("shard.tar").write_bytes(data)
    for _ in read_tar("shard.tar"):
        pass


_TYPES = [bytes([code]) for code in b"0123456759LKxXgSMVDN\0?"]
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            "k.jpg",
            "k.cls",
            "k.json",
            "../k.jpg",
            "/k.jpg",
            "k.jpg\0",
            "a\\b.jpg",
            "x" * 5000,
            "k.exe",
            "\x1b[2J.jpg",
        )
    ),
)


def _header(name: str, kind: bytes, size: int, content: bytes) -> bytes:
    """A header that may lie about the size, with a right checksum."""
    info = tarfile.TarInfo()
    try:
        raw = bytearray(
            info.create_gnu_header({**info.get_info(), "name": name[:90], "size": size}, "utf-8", "replace")
        )
    except (ValueError, OverflowError):
        raw = bytearray(info.tobuf())
    raw[156:157] = kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw) + content + bytes(-len(content) % 512)


_RECORDS = st.lists(
    st.builds(
        lambda key, value, wrong: (lambda body: b"%d%s" % (len(body) + 2 + wrong, body))(
            b" " + key.encode(errors="replace") + b"=" + value.encode(errors="replace") + b"\n"
        ),
        st.one_of(
            _TEXTS, st.sampled_from(("path", "size", "GNU.sparse.map", "linkpath", "hdrcharset", "uname"))
        ),
        st.one_of(_TEXTS, st.integers().map(str)),
        st.sampled_from((0, 0, 0, 1, -1, 10**20)),
    ),
    max_size=8,
).map(b"".join)
_LABELS = st.one_of(
    st.binary(max_size=30), st.just(b"9" * 5000), st.just(b"x" * 70_000), st.just(b'{"label": 1e999}')
)


def _made_tar() -> st.SearchStrategy[Case]:
    contents = st.one_of(
        st.just(_PICTURE), _LABELS, _RECORDS, _TEXTS.map(lambda text: text.encode(errors="replace"))
    )
    sizes = st.one_of(
        st.none(), st.none(), st.sampled_from((0, 1, 511, 513, 1 << 16, 1 << 28, 1 << 33, 1 << 63))
    )
    member = st.builds(
        lambda name, kind, size, data: _header(name, kind, len(data) if size is None else size, data),
        _TEXTS,
        st.sampled_from([b"0", b"0", b"0", b"x", b"L", *_TYPES]),
        sizes,
        contents,
    )
    raw = st.lists(member, max_size=8).map(b"".join)
    pack = st.sampled_from((bytes, bytes, gzip.compress, bz2.compress, lzma.compress))
    return st.one_of(
        st.builds(lambda body, tool: ("made", tool(body)), raw, pack),
        # Parts compressed with gzip may follow each other.
        st.builds(
            lambda body, bomb: ("gz", gzip.compress(body) + bomb),
            raw,
            st.sampled_from((b"",) * 20 + _bombs()),
        ),
    )


@functools.cache
def _bombs() -> tuple[bytes, ...]:
    return gzip.compress(bytes(40 << 20), 1), gzip.compress(b"\1" * (70 << 20), 1), gzip.compress(b"") * 9000


DOORS = {
    "files": Door(seeds=_seeds, enter=_enter, made=_made),
    "tar": Door(
        seeds=_shards, enter=_enter_tar, made=_made_tar,
        tokens=(b"ustar\x0000", b"GNU.sparse.map=1", b"../", b"\x1f\x8b", bytes(512)),
    ),
}  # fmt: skip
