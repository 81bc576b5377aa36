"""Connections that a slow or silent client cannot hold open, and a server that shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import signal
import sys
import termios
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Seconds within which a connection must send the head of a request."""
HEAD_BYTES = 1 << 14
MOST_CONNECTIONS = 2048


class Connection(H11Protocol):
    """uvicorn's connection with a time limit for the head of a request, counted from the last byte of the previous
    answer. A client may read slowly, but must read."""

    _watch: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that waited for the client at the last check."""

    def __init__(self, *args: Any, unread_seconds: float, **settings: Any) -> None:
        """The connection ends after `unread_seconds` in which the client has read none of the waiting data."""
        super().__init__(*args, **settings)
        self._unread_seconds = unread_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that it is notified when the last byte has left
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget()
        self._left = self._unread()
        self._watch = self.loop.call_later(self._unread_seconds, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget()
        self._expect()

    def _unread(self) -> int:
        """Bytes that the client has not received: in this process, and in the kernel, which may hold millions."""
        raw = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int(self.transport.get_write_buffer_size() + int.from_bytes(raw, sys.byteorder))

    def _look(self) -> None:
        """End a connection whose client has read nothing since the last check."""
        before, self._left = self._left, self._unread()
        if self._left >= before:
            self._watch = None
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(self._unread_seconds, self._look)

    def _expect(self) -> None:
        """Start the time limit for the head of the next request, once nothing else is in progress."""
        if self.flow is not None and self.flow.write_paused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._watch is None:
            self._watch = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _too_late(self) -> None:
        self._watch = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, but it returns to the program afterwards: at the first SIGTERM or SIGINT it stops accepting
    requests and finishes those in progress; at the second it leaves."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
