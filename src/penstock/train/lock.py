"""One run per output directory, on one machine or several that share a disk.

On one machine a POSIX record lock on `OUTPUT/lock` decides: the kernel releases it however the process dies, and,
unlike `flock`, forked processes do not inherit it. Not every shared file system carries such locks across machines. So
the file also says who holds it, the holder touches it, and a lock that another host has touched lately is respected.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from penstock.boundary.files import shown
from penstock.boundary.trees import parse_json
from penstock.errors import EnvironmentProblem, PenstockError

_TOUCH_SECONDS = 20.0
_FRESH_SECONDS = 120.0
_held: set[Path] = set()  # record locks do not exclude a second use by the same process; this does


class RunLock:
    """Holds the output directory `folder` while entered.

    Raises:
        EnvironmentProblem: on entering, when another run holds it; names its pid and host.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / "lock"
        self._handle: int | None = None
        self._touched = 0.0

    def __enter__(self) -> Self:
        if self._path in _held:
            raise self._refusal({"pid": os.getpid(), "host": socket.gethostname()})
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._respect_other_host(handle)
        except OSError:
            holder = _holder(handle)
            os.close(handle)
            raise self._refusal(holder) from None
        except EnvironmentProblem:
            os.close(handle)
            raise
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        self._handle = handle
        self._touched = time.monotonic()
        _held.add(self._path)
        return self

    def touch(self) -> None:
        """Touch the lock, at most every 20 seconds, to show that the run goes on. Cheap enough for every step."""
        if self._handle is not None and time.monotonic() - self._touched > _TOUCH_SECONDS:
            os.utime(self._handle)
            self._touched = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            _held.discard(self._path)
            os.ftruncate(self._handle, 0)  # never unlinked: a waiting run would hold a file that is gone
            os.close(self._handle)
            self._handle = None

    def _respect_other_host(self, handle: int) -> None:
        holder = _holder(handle)
        age = time.time() - os.fstat(handle).st_mtime
        if holder and holder.get("host") != socket.gethostname() and age < _FRESH_SECONDS:
            raise self._refusal(holder)

    def _refusal(self, holder: dict[str, Any]) -> EnvironmentProblem:
        pid, host = holder.get("pid", "unknown"), holder.get("host", "an unknown host")
        who = f"process {shown(str(pid))} on {shown(str(host))}"
        return EnvironmentProblem(
            f"{self._path.parent} is in use by {who}. Wait for that run, stop it, or choose another output. "
            f"(If its machine has died, the lock lapses {_FRESH_SECONDS:.0f} seconds after its last step.)"
        )


def _holder(handle: int) -> dict[str, Any]:
    try:
        return parse_json(os.pread(handle, 4096, 0), "The lock")
    except (OSError, PenstockError):
        return {}
