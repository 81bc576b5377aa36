"""The other nodes' agents, from an agent's view. Here for one node; `meeting`, which imports torch, for several."""

from __future__ import annotations

import os
import socket
from typing import Self

from penstock.launch.ranks import Assignment
from penstock.launch.report import Outcome


class Nodes:
    """All nodes' agents, from this agent's view. This class is for a single node and has no others to ask."""

    def __init__(self, procs: int) -> None:
        self._procs = procs
        self._round = -1
        self._launch = os.urandom(16).hex()
        self._port: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._port is not None:
            self._port.close()

    def meet(self, restarts: int) -> Assignment:
        """Wait until the agents of the next life have come, and divide the ranks among them. `restarts` is the number
        of times that this agent has seen all ranks restarted after faults.
        """
        self._round += 1
        master = self._reserve("127.0.0.1")
        return Assignment(0, 1, 0, self._procs, master, self._round, restarts, self._launch)

    def report(self, outcome: Outcome) -> None:
        """Report to the other agents how this life ended here."""

    def heard(self) -> Outcome | None:
        """The first report of another agent on this life, or that an agent is lost. Cheap enough for every tick."""
        return None

    def waiting(self) -> bool:
        """Whether another node wants to join."""
        return False

    def _reserve(self, host: str) -> tuple[str, int]:
        """A free port of `host` for rank 0's store in the next life; it replaces the last life's port.

        No other program gets it, but a rank can listen on it: this socket is bound without listening, and both set
        SO_REUSEADDR, as every server does.
        """
        if self._port is not None:
            self._port.close()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._port = socket.socket(family, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((host, 0))
        return host, self._port.getsockname()[1]
