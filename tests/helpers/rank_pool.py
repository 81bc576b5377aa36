"""Ranks that are started once and run many cases: `pool(world).run(function, *args)`, as `helpers.spawn` runs one.

A case costs some milliseconds beside its own work. What a case leaves in its processes, the next one finds there:
functions build what they need and keep nothing. After a failure all ranks of the pool are ended, and the next case
starts new ones.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from helpers.spawn import Rank, ask, start_server, turn

R = TypeVar("R")
_TIMEOUT = 300.0
"""Seconds after which a collective that nobody answers fails."""


class RankPool:
    """`world` ranks of a gloo group on 127.0.0.1, started by the first case."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[Rank] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None
        self._guard: subprocess.Popen[bytes] | None = None
        """Ends the ranks when this process is gone: those that stand still cannot do so themselves."""

    def run(self, function: Callable[..., R], *args: Any, timeout: float = 60.0) -> list[R]:
        """What `function(*args)` returned on each rank, by rank. Takes and raises what `helpers.spawn.spawn` does."""
        with turn():
            if not self._ranks:
                self._start()
            try:
                self._signal(signal.SIGCONT)
                results = ask(self._ranks, function, args, timeout)
                self._signal(signal.SIGSTOP)
                return results
            except BaseException:
                self.close()
                raise

    def _signal(self, number: signal.Signals) -> None:
        """Let all ranks stand still, or go on. Gloo has a thread for each group that a rank was ever in, which looks
        for messages a hundred times a second: ranks that wait for the next case would take half of two cores.
        """
        for rank in self._ranks:
            os.kill(rank.process.pid, number)

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        start_server()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-pool-")
        self._ranks = [Rank(number, Path(self._scratch.name)) for number in range(self.world)]
        for rank in self._ranks:
            rank.start(self.world, self._store.port, _TIMEOUT)
        pids = [str(rank.process.pid) for rank in self._ranks]
        self._guard = subprocess.Popen(
            ["sh", "-c", 'read line; kill -9 "$@"', "guard", *pids],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """End all ranks."""
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        for rank in self._ranks:
            rank.end()
        self._ranks, self._store = [], None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


@cache
def pool(world: int) -> RankPool:
    """The pool of so many ranks, which lives until this process ends."""
    made = RankPool(world)
    atexit.register(made.close)
    return made
