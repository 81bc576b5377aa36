"""The reader of files: whatever a path leads to, the answer is its content or a sentence, at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.boundary.files import open_regular, quoted, read_bytes, read_text, shown
from penstock.errors import ConfigError, DataError


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "it does not exist. Check the path."),
    "fifo": (os.mkfifo, "it is a named pipe, not a regular file"),
    "zero": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "folder": (lambda path: path.mkdir(), "it is a folder"),
    "socket": (_socket, "it is a socket"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "it is a link to nowhere, which does not exist"),
    "circle": (lambda path: path.symlink_to(path), "it is a link that leads back to itself"),
    "sparse": (
        lambda path: (path.touch(), os.truncate(path, 3 << 30)),
        "has 3,221,225,472 bytes, and at most 1,000 are read",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_of_reasonable_size_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    make, words = OTHERS[kind]
    path = tmp_path / "it"
    make(path)
    with pytest.raises(ConfigError) as refused:
        read_bytes(path, "The plan", limit=1000, error=ConfigError)
    assert str(refused.value).startswith(f"The plan {path} ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x" * 300, "its name is too long"),
        ("file/below", "a part of its path is a file"),
        ("nul\0", "impossible"),
        ("\ud800", "impossible"),
    ],
)
def test_impossible_names_are_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=words):
        read_bytes(f"{tmp_path}/{name}", "The plan", limit=10)


def test_the_limit_counts_what_is_read_and_not_what_a_file_claims(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, "It", limit=10) == b"0123456789"
    with pytest.raises(DataError, match="has 10 bytes, and at most 9"):
        read_bytes(path, "It", limit=9)
    path.write_bytes(b"")
    assert read_bytes(path, "It", limit=0) == b""
    # Files of /proc say that they are empty.
    assert read_bytes("/proc/self/status", "It", limit=1 << 20).startswith(b"Name:")
    with pytest.raises(DataError, match="has more than 20 bytes"):
        read_bytes("/proc/self/status", "It", limit=20)


def test_text_is_utf8_and_the_callers_remedy_stands(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("\ufeffgrün".encode())
    assert read_text(path, "It", limit=100) == "grün"
    path.write_bytes(b"gr\xfcn")
    with pytest.raises(DataError, match="byte 2 is 0xfc"):
        read_text(path, "It", limit=100)
    with pytest.raises(DataError, match="Pack it again"):
        read_text(tmp_path / "none", "It", limit=100, remedy="Pack it again.")


def test_a_stream_is_not_limited_and_not_inherited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with open_regular(path, "It") as file:
        assert not os.get_inheritable(file.fileno())
        assert file.read(2) == b"ab"


def test_what_is_shown_moves_no_cursor() -> None:
    assert quoted("a\x1b[2Jb\u202e") == r"'a\x1b[2Jb\u202e'"
    assert len(quoted("x" * 10_000)) < 100
    assert shown("/data/grün") == "/data/grün"
    assert shown("/data/\x1b[2J") == r"'/data/\x1b[2J'"
    assert shown("") == "''"
