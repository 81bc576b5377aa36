"""Bytes to and from the disk, hashed on the way.

Note [Streaming]
    Large files are written in pieces. While one piece is written, a second thread hashes it and a third flushes
    earlier pieces. So the disk works from the first piece on, and the last flush is short. What has been flushed or
    read back is dropped from the system's page cache. Nobody reads it again soon; a checkpoint would push out training
    data, which is read all the time; and reusing pages costs less than taking new ones. (On a virtual machine, whose
    host has to find each new page, writing 1 GB took 4 s of processor time without this, and 0.5 s with it.) It also
    means that a checkpoint is verified by what the disk gives back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.boundary.files import naming

PIECE_BYTES = 16_000_000
"""Bytes that are hashed at a time, while they are written or the next ones are read."""
THREAD_BYTES = 1_000_000
FLUSH_BYTES = 64_000_000
"""Bytes that are flushed together; smaller files stay in the page cache."""


@dataclass(frozen=True, slots=True)
class Written:
    """The properties of a file: its size in bytes and the sha256 of its content, in hex."""

    bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write the byte-like `chunks` to `path`, hash them on the way, and force them to the disk.

    A chunk must not change until the chunk after the next is requested. See Note [Streaming].

    Raises:
        OSError: the disk is full, or fails.
    """
    digest = hashlib.sha256()
    size = flushed = 0
    with (
        naming(path),
        path.open("wb") as file,
        SecondThread("penstock-hash") as hashing,
        SecondThread("penstock-flush") as flushing,
    ):
        handle = file.fileno()
        for piece in _pieces(chunks):
            hashing.do(digest.update, piece, now=len(piece) < THREAD_BYTES)
            file.write(piece)
            size += len(piece)
            if size - flushed >= FLUSH_BYTES:
                file.flush()
                flushing.do(_flush, handle, flushed, size - flushed)
                flushed = size
        hashing.wait()
        flushing.wait()
        file.flush()
        os.fsync(handle)
        if flushed:
            _forget(handle, flushed, size - flushed)
    return Written(size, digest.hexdigest())


def digest_file(path: Path, *, keep_cached: bool = True) -> str:
    """The sha256 of the content of `path`, in hex. With `keep_cached` false a large file leaves nothing in the page
    cache, because nobody will read it soon.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    digest = hashlib.sha256()
    position = 0
    with naming(path), _regular(path) as file, SecondThread("penstock-hash") as hashing:
        size = os.fstat(file.fileno()).st_size
        drops = not keep_cached and size >= FLUSH_BYTES
        buffers = [bytearray(min(PIECE_BYTES, size) or 1) for _ in range(2)]
        turn = 0
        while count := file.readinto(buffers[turn]):
            hashing.do(digest.update, memoryview(buffers[turn])[:count], now=count < THREAD_BYTES)
            if drops:
                _forget(file.fileno(), position, count)
            position += count
            turn = 1 - turn
        hashing.wait()
    return digest.hexdigest()


def _regular(path: Path) -> FileIO:
    """Open a regular file for reading. Anything else, such as a pipe, is refused, because it could block for ever."""
    if not path.is_file() and path.exists():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.open("rb", buffering=0)


class SecondThread:
    """Runs one action at a time in a second thread; the next one waits for the one before.

    It uses plain threads. An executor of concurrent.futures accepts no work after the main thread has ended, and a
    background save may take longer.
    """

    def __init__(self, name: str, *, daemon: bool = True) -> None:
        """At its exit, the process waits for the thread unless it is a `daemon`."""
        self._name = name
        self._daemon = daemon
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def do(self, action: Callable[..., object], *arguments: Any, now: bool = False) -> None:
        """Start `action` after the previous one. With `now` it runs in this thread, if it is short."""
        self.wait()
        if now:
            action(*arguments)
            return
        self._thread = threading.Thread(
            target=self._run, args=(action, arguments), name=self._name, daemon=self._daemon
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether an action is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the action is done, and raise its exception, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _run(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            action(*arguments)
        except BaseException as problem:  # noqa: BLE001  # raised again where it is waited for
            self._problem = problem

    def __enter__(self) -> SecondThread:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:  # an exception is raised, and the thread still uses the file
            self._thread.join()


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        if len(chunk) <= PIECE_BYTES:
            yield chunk
        else:
            whole = memoryview(chunk)
            yield from (whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES))


def _flush(handle: int, start: int, count: int) -> None:
    getattr(os, "fdatasync", os.fsync)(handle)
    _forget(handle, start, count)


def _forget(handle: int, start: int, count: int) -> None:
    """Drop flushed or read bytes from the page cache, if the system supports it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, count, os.POSIX_FADV_DONTNEED)
