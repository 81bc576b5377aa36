"""Connections of slow and silent clients, in this process."""

from __future__ import annotations

import asyncio
import functools
import socket

import pytest

uvicorn = pytest.importorskip("uvicorn")

from penstock.serve import connection  # noqa: E402

LARGE = b"x" * (24 << 20)
"""More than the buffers of two sockets hold."""


async def _app(scope: object, receive: object, send: object) -> None:
    headers = [(b"content-length", str(len(LARGE)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": LARGE})  # type: ignore[operator]


async def _read(port: int, head: bytes, pauses: list[float]) -> int:
    """Bytes of an answer that a client gets which pauses before its first reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    client.setblocking(False)
    loop, count = asyncio.get_running_loop(), 0
    with client:
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        while count < len(LARGE):
            if pauses:
                await asyncio.sleep(pauses.pop())
            try:
                piece = await loop.sock_recv(client, 1 << 20)
            except ConnectionError:
                break
            count += len(piece.partition(b"\r\n\r\n")[2]) if count == 0 else len(piece)
            if not piece:
                break
    return count


@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
@pytest.mark.parametrize(
    ("unread_seconds", "pauses", "whole"),
    [
        pytest.param(60.0, [0.5], True, id="a pause longer than the next head may take"),
        pytest.param(0.2, [0.04] * 20, True, id="slow reading, longer than nothing may be read"),
        pytest.param(0.2, [1.0], False, id="nothing is read"),
    ],
)
def test_a_client_may_read_slowly_but_must_read(
    head: bytes, unread_seconds: float, pauses: list[float], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    made = functools.partial(connection.Connection, unread_seconds=unread_seconds)

    async def run() -> int:
        config = uvicorn.Config(
            _app, http=made, ws="none", lifespan="off", log_config=None, timeout_keep_alive=99
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = connection.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            count = await _read(listener.getsockname()[1], head, list(pauses))
            server.should_exit = True
            await serving
        return count

    assert (asyncio.run(run()) == len(LARGE)) == whole
