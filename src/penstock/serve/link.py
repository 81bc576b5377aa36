"""Messages between the server and its worker: one JSON table a line, over a pair of sockets that nobody else has."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

MOST_BYTES = 1 << 26
"""Most bytes of one message: a vector for each of some thousand texts."""


class Closed(Exception):
    """The other side has gone."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Link:
    """The worker's end."""

    def __init__(self, handle: int) -> None:
        self._socket = socket.socket(fileno=handle)
        self._partial = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises Closed."""
        try:
            self._socket.sendall(packed(message))
        except OSError:
            raise Closed from None

    def receive(self, *, wait: bool) -> list[dict[str, Any]]:
        """Messages that have come; with `wait`, at least one. Raises Closed."""
        messages: list[dict[str, Any]] = []
        while True:
            block = wait and not messages
            if not block and not select.select([self._socket], [], [], 0)[0]:
                return messages
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                raise Closed from None
            if not more:
                raise Closed
            *lines, self._partial = (self._partial + more).split(b"\n")
            messages += [json.loads(line) for line in lines]
