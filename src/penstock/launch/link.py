"""Messages between a process and one that it has started: a JSON table a line, over a socket that nobody else has."""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from typing import Any

MOST_BYTES = 1 << 26
"""Most bytes of one message: a vector for each of some thousand texts."""


class Closed(Exception):
    """The other side has gone."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class JsonLink:
    """One end of such a socket, which is its own from now on."""

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
        """The next message. None where nothing comes for `timeout` seconds, which may be 0; without a timeout it waits.
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
        """Let the other side know that this one has gone."""
        self._socket.close()
