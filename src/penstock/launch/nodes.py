"""What an agent asks of the other nodes' agents. `Alone` answers for one node, `meeting`, with torch, for several."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from penstock.launch.ranks import Assignment
from penstock.launch.verdict import Outcome


class Nodes(Protocol):
    """The other nodes' agents, as this one sees them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def meet(self, restarts: int) -> Assignment:
        """Wait until the agents of the next life are there, and share the ranks out among them. `restarts` counts how
        often this agent has seen all ranks restarted after faults.
        """

    def report(self, outcome: Outcome) -> None:
        """Tell the others how this life ended here."""

    def heard(self) -> Outcome | None:
        """The first report of another agent on this life, or that one is lost. Cheap enough for every tick."""

    def waiting(self) -> bool:
        """Whether another node wants to join."""


class Alone:
    """A single node: there is nobody to ask."""

    def __init__(self, procs: int) -> None:
        self._procs = procs
        self._round = 0
        self._port: ReservedPort | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._port is not None:
            self._port.close()

    def meet(self, restarts: int) -> Assignment:
        if self._port is not None:
            self._port.close()
        self._port = ReservedPort("127.0.0.1")
        self._round += 1
        master = ("127.0.0.1", self._port.number)
        return Assignment(0, 1, 0, self._procs, master, self._round - 1, restarts)

    def report(self, outcome: Outcome) -> None:
        return None

    def heard(self) -> Outcome | None:
        return None

    def waiting(self) -> bool:
        return False


class ReservedPort:
    """A free port that no other program is given while this is open, and on which a rank can listen. The socket is
    bound and does not listen, and both set SO_REUSEADDR, as every server does.
    """

    def __init__(self, host: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]
        self.close: Callable[[], None] = self._socket.close
