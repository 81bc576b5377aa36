"""Temporary files and folders that do not pile up if processes are killed: creating one first removes those of dead
processes.

The process that creates one holds a lock on it (`flock`), which the kernel releases however the process ends. So a file
that can be locked has no owner any more. If a file system does not support such locks, nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary(parent: Path | None, prefix: str, *, folder: bool = True) -> Iterator[Path]:
    """A new folder, or an empty file, in `parent` (None: the system's folder for temporary files), removed afterwards
    unless it was renamed. Leftovers of this user's killed processes with the same prefix are removed first. Raises
    OSError if it cannot be created."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent, prefix)
    path, handle = _make(parent, prefix, folder)
    try:
        yield path
    finally:
        _remove(path)
        if handle is not None:
            os.close(handle)


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `target`, then rename it to `target` in one step. Raises OSError if it
    cannot be written."""
    with temporary(target.parent, ".penstock-", folder=False) as partial:
        write(partial)
        make_public(partial)
        partial.replace(target)


def make_public(path: Path) -> None:
    """Give a temporary file or folder, which is private at first, the permissions of a normal new one."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _make(parent: Path, prefix: str, folder: bool) -> tuple[Path, int | None]:
    while True:
        if folder:
            path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        else:
            opened, name = tempfile.mkstemp(dir=parent, prefix=prefix)
            os.close(opened)
            path = Path(name)
        handle = _lock(path, wait=True)
        if path.exists():  # else another process removed it as a leftover before it was locked
            return path, handle
        if handle is not None:
            os.close(handle)


def _sweep(parent: Path, prefix: str) -> None:
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # a folder may be writable but not readable
        paths = [path for path in parent.iterdir() if path.name.startswith(prefix)]
    for path in paths:
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                handle = _lock(path)
                if handle is not None:
                    _remove(path)
                    os.close(handle)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """A handle that holds the lock; None if another process holds it, or the file system has no locks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
