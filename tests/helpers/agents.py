"""Agents of `penstock launch` under test: started as a user would, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helpers.forked import Popen
from helpers.spawn import QUIET


class Agent:
    """`penstock launch ARGUMENTS` as a process, killed with all its ranks on leaving the context. With `forked` it and
    its ranks are forked (`helpers.forked`) and start sooner. `prefix` is a command that runs it, such as on a host."""

    def __init__(
        self, *arguments: str, log: Path, environment: dict[str, str] | None = None, forked: bool = False,
        prefix: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._log = log
        start: Any = Popen if forked else subprocess.Popen
        with log.open("w") as out:
            self.process: Popen | subprocess.Popen[bytes] = start(
                [*prefix, sys.executable, "-m", "penstock", "launch", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **QUIET, **(environment or {})},
            )

    @property
    def said(self) -> str:
        """All that it and its ranks have written."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The agent did not end within {timeout:g} s:\n{self.said}") from None

    def until(self, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        """Wait for something to happen while it runs."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"The agent has ended:\n{self.said}"
            assert time.monotonic() < end, f"It did not happen within {timeout:g} s:\n{self.said}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Signal the agent."""
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its ranks die with it; a test of just that holds this
        self.process.wait()


def alive(folder: Path) -> list[int]:
    """The processes that left a `pid.N` in `folder` and still run."""
    return [pid for pid in map(_pid, folder.glob("pid.*")) if _runs(pid)]


def no_orphans(folder: Path, timeout: float = 10.0) -> None:
    """Hold that all of them end within `timeout` seconds."""
    assert list(folder.glob("pid.*")), "no process was ever noted"
    end = time.monotonic() + timeout
    while orphans := alive(folder):
        assert time.monotonic() < end, f"left behind: {orphans}"
        time.sleep(0.05)


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pid(file: Path) -> int:
    return int(file.name.partition(".")[2])


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
