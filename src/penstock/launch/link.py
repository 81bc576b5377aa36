"""Messages between a process and a child that it has started: one JSON object per line, over a private socket."""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from typing import Any

MOST_BYTES = 1 << 26
"""Most bytes of one message: enough for a vector for each of some thousand texts."""


class Closed(Exception):
    """The other side is gone."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class JsonLink:
    """One end of such a socket; it now belongs to this object."""

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
