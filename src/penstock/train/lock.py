"""One run per output directory, on one machine or several that share a disk.

On one machine a POSIX record lock on `OUTPUT/lock` decides: the kernel releases it however the process dies, and,
unlike `flock`, forked processes do not inherit it. Not every shared file system carries such locks across machines. So
the file also names the holder, which regularly updates the file's time. A lock held by another host expires when this
time is two minutes old, and a new run waits for that. Later ranks of the same `penstock launch` need not wait, because
their agents have agreed that the earlier ranks are gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import stat
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from penstock.boundary.files import own_file, shown
from penstock.boundary.trees import parse_json
from penstock.errors import EnvironmentProblem, PenstockError
from penstock.launch import LAUNCH

_log = logging.getLogger(__name__)
_TOUCH_SECONDS = 20.0
_FRESH_SECONDS = 120.0
_PAUSE_SECONDS = 1.0
_held: set[Path] = set()  # record locks do not exclude a second use by the same process; this set does


class RunLock:
    """Holds the output directory `folder` inside the context. Entering raises EnvironmentProblem, with pid and host, if
    another run holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / "lock"
        self._handle: int | None = None
        self._text = b""
        self._touched = 0.0
        self._lapses: tuple[float, float] | None = None
        """While waiting: the time in the other host's lock, and the `time.monotonic()` at which that lock expires."""

    def __enter__(self) -> Self:
        while not self.hold():
            time.sleep(_PAUSE_SECONDS)
        return self

    def hold(self) -> bool:
        """Take the lock. Returns False while another host may hold it: try again soon. Raises as entering does."""
        if self._path in _held:
            raise self._refusal({"pid": os.getpid(), "host": socket.gethostname()})
        own_file(self._path.parent, self._path.name)
        with ExitStack() as opened:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            opened.callback(os.close, handle)
            if not self._try_to_take(handle):
                return False
            opened.pop_all()
        launch, life = _own_life()
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        self._text = json.dumps(me | {"launch": launch, "life": life}).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._text, 0)
        self._handle, self._touched = handle, time.monotonic()
        _held.add(self._path)
        return True

    def touch(self) -> None:
        """Update the lock's time, at most every 20 seconds, to show that the run continues. Cheap enough for every
        step. Raises EnvironmentProblem if another host considered this run dead, and has taken over the directory."""
        if self._handle is not None and time.monotonic() - self._touched > _TOUCH_SECONDS:
            holder = _holder(self._handle)
            if holder and json.dumps(holder).encode() != self._text:
                self._close(self._handle)
                raise self._refusal(holder)
            os.utime(self._handle)
            self._touched = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.ftruncate(self._handle, 0)  # never deleted: a waiting run would keep a file that is gone
            self._close(self._handle)

    def _close(self, handle: int) -> None:
        os.close(handle)
        self._handle = None
        _held.discard(self._path)

    def _try_to_take(self, handle: int) -> bool:
        """Whether the lock now belongs to this run. Raises EnvironmentProblem if it cannot."""
        holder, state = _holder(handle), os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or (state.st_nlink > 1 and state.st_size and "pid" not in holder):
            raise EnvironmentProblem(
                f"{self._path} is also another file, which locking would empty. Remove it, or choose another output."
            )
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        elsewhere = bool(holder) and holder.get("host") != socket.gethostname()
        if elsewhere and not (free and _is_earlier_life(holder)) and self._may_lapse(holder, state.st_mtime):
            return False
        if not free:
            raise self._refusal(holder)
        return True

    def _may_lapse(self, holder: dict[str, Any], touched: float) -> bool:
        """Whether to wait for another host's lock to expire. Raises EnvironmentProblem if that host is alive."""
        now = time.monotonic()
        if self._lapses is None:
            remaining = min(_FRESH_SECONDS, touched + _FRESH_SECONDS - time.time())
            self._lapses = touched, now + remaining
            if remaining > 0:
                _log.warning(
                    "%s was in use by %s %.0f s ago. Waiting %.0f s for its lock to lapse, if it has died.",
                    self._path.parent, _who(holder), _FRESH_SECONDS - remaining, remaining,
                )  # fmt: skip
        if touched != self._lapses[0]:
            raise self._refusal(holder)
        return now < self._lapses[1]

    def _refusal(self, holder: dict[str, Any]) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self._path.parent} is in use by {_who(holder)}. Wait for that run, stop it, or choose another output. "
            f"(If its machine has died, the lock lapses {_FRESH_SECONDS:.0f} seconds after its last step.)"
        )


def _own_life() -> tuple[str, int]:
    """The `penstock launch` that this process is a rank of (empty if none), and the number of its life."""
    return os.environ.get(LAUNCH, ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _is_earlier_life(holder: dict[str, Any]) -> bool:
    launch, life = _own_life()
    before = holder.get("life")
    return bool(launch) and holder.get("launch") == launch and isinstance(before, int) and before < life


def _who(holder: dict[str, Any]) -> str:
    pid, host = holder.get("pid", "unknown"), holder.get("host", "an unknown host")
    return f"process {shown(str(pid))} on {shown(str(host))}"


def _holder(handle: int) -> dict[str, Any]:
    try:
        return parse_json(os.pread(handle, 4096, 0), "The lock")
    except (OSError, PenstockError):
        return {}
