"""Messages between two processes, over the two ends of one socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from penstock.launch.local import Closed, JsonLink, packed


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, JsonLink]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, JsonLink(second)


def test_messages_come_one_by_one_however_the_bytes_do(ends: tuple[socket.socket, JsonLink]) -> None:
    raw, link = ends
    messages = [{"made": [1, "ä\n"]}, {}, {"loss": None, "seconds": 0.25}, {"ids": list(range(20_000))}]
    sent = b"".join(map(packed, messages))
    raw.sendall(sent[:9])
    assert link.receive(0.0) is None
    raw.sendall(sent[9:40])
    assert [link.receive(), link.receive()] == messages[:2]
    raw.sendall(sent[40:])
    assert [link.receive(), link.receive(), link.receive(0.0)] == [*messages[2:], None]


def test_waiting_ends_after_its_time(ends: tuple[socket.socket, JsonLink]) -> None:
    begun = time.monotonic()
    assert ends[1].receive(0.2) is None
    assert time.monotonic() - begun >= 0.2


def test_who_has_gone_is_said_after_its_last_message(ends: tuple[socket.socket, JsonLink]) -> None:
    raw, link = ends
    raw.sendall(packed({"last": 1}) + b'{"cut')
    raw.close()
    assert link.receive() == {"last": 1}
    with pytest.raises(Closed):
        link.receive(0.0)
    with pytest.raises(Closed):
        link.send(more=1)
