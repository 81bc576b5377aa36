"""Ranks on one host that a program starts for itself, and the messages between it and them.

The program keeps the store at which the ranks meet, so it outlives any rank, and no port has to be guessed. A message
is one JSON object per line, over a private socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = "127.0.0.1"
MOST_BYTES = 1 << 26
"""Maximum bytes of one message: enough for a vector for each of some thousand texts."""
STORE_ELSEWHERE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that is set if rank 0 need not serve a store, because the process that started it does."""


def rank_environment(
    rank: int, world: int, local: int, local_world: int, host: str, port: int
) -> dict[str, str]:
    """The variables that torch.distributed's `env://` reads, with torchrun's names."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
    }  # fmt: skip


class LocalRanks:
    """The ranks of one group of `world`, each a process on this host."""

    def __init__(self, world: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.world = world
        self._store: Any = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of a rank."""
        place = rank_environment(rank, self.world, rank, self.world, HERE, self._store.port)
        return place | {STORE_ELSEWHERE: "True"}

    def start(
        self, module: str, rank: int, *, log: Path | None = None, defaults: Mapping[str, str] = {}
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start `python -m MODULE FD` as a rank; returns it with this side of the connection whose other side is FD.

        Its output goes to `log`, or to this process's output. `defaults` are variables that the user may override.
        """
        own_end, rank_end = socket.socketpair()
        with rank_end, contextlib.nullcontext() if log is None else log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(rank_end.fileno())],
                env={**defaults, **os.environ, **self.environment(rank)},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=[rank_end.fileno()],
            )  # fmt: skip
        return process, own_end


class Closed(Exception):
    """The other side is gone."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class JsonLink:
    """One end of the socket; it now belongs to this object."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines: deque[bytes] = deque()
        self._partial = bytearray()

    def send(self, **message: Any) -> None:
        """Send a message. Raises Closed."""
        try:
            self._socket.sendall(packed(message))
        except OSError:
            raise Closed from None

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message. None if nothing comes within `timeout` seconds, which may be 0; without a timeout it waits.
        Raises Closed."""
        while not self._lines:
            if not select.select([self._socket], [], [], timeout)[0]:
                return None
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                raise Closed from None
            if not more:
                raise Closed
            self._partial += more
            if b"\n" in more:
                *lines, rest = bytes(self._partial).split(b"\n")
                self._lines += lines
                self._partial = bytearray(rest)
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def close(self) -> None:
        """Close this end, so that the other side notices."""
        self._socket.close()
