"""What is streamed is what was given, whatever its pieces, and a failure of any thread is told."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from pathlib import Path

import pytest

from penstock import disk


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few kilobytes go through every thread."""
    monkeypatch.setattr(disk, "PIECE_BYTES", 1000)
    monkeypatch.setattr(disk, "THREAD_BYTES", 300)
    monkeypatch.setattr(disk, "FLUSH_BYTES", 2500)


@pytest.mark.parametrize("lengths", [[], [0], [1], [299, 300, 301], [999, 1000, 1001], [10_000, 5, 2500]])
def test_a_stream_is_hashed_and_written_as_given(tmp_path: Path, small: None, lengths: list[int]) -> None:
    chunks = [random.Random(length).randbytes(length) for length in lengths]
    content = b"".join(chunks)
    path = tmp_path / "file"
    written = disk.write_file(path, (memoryview(chunk) for chunk in chunks))
    assert path.read_bytes() == content
    assert written == disk.Written(len(content), hashlib.sha256(content).hexdigest())
    assert disk.digest_file(path) == written.sha256
    assert disk.digest_file(path, keep_cached=False) == written.sha256


def test_everything_is_flushed_before_it_is_dropped(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("flush"))
    monkeypatch.setattr(os, "fdatasync", lambda handle: done.append("flush"), raising=False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: done.append("drop"), raising=False)
    disk.write_file(tmp_path / "file", [bytes(6000)])
    assert done == ["flush", "drop"] * 3
    done.clear()
    disk.write_file(tmp_path / "file", [bytes(2000)])
    assert done == ["flush"], "what is small stays in the page cache"


@pytest.mark.parametrize("where", ["update", "fdatasync", "fsync"])
def test_a_failure_of_any_thread_is_told_and_leaves_none(
    tmp_path: Path, small: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "update":
        monkeypatch.setattr(disk.hashlib, "sha256", lambda: type("Broken", (), {"update": fails})())
    else:
        monkeypatch.setattr(os, where, fails)
    with pytest.raises(OSError, match="No space left"):
        disk.write_file(tmp_path / "file", [bytes(9000)])
    assert not [
        thread for thread in threading.enumerate() if thread.name in ("penstock-hash", "penstock-flush")
    ]
