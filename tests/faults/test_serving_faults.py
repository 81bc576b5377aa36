"""Clients and models that would stop a server, or take its memory: it goes on, and says what is wrong."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.models_of_strangers import split_by
from helpers.rows import Note
from helpers.served import Running, served
from penstock.data.text.tokenizers import Bytes
from penstock.errors import DataError

pytest.importorskip("uvicorn")
TEMPLATE = """\
{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% elif messages[0].content == 'long' %}{{ messages[0].content * 1000000000 }}
{% elif messages[0].content == 'deep' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{% endif %}a:"""


def _folder(where: Path) -> Path:
    made = where / "fake-1"
    made.mkdir()
    Bytes().save(made)
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return made


def _slowly(running: Running, body: bytes, pause: float, *, closes: bool) -> tuple[int, int]:
    """Bytes of an answer that were announced, and those that a client got that paused once."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        client.connect(("127.0.0.1", running.port))
        head = "Connection: close\r\n" if closes else ""
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        first = client.recv(2000)
        wanted = int(first.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        count = len(first.partition(b"\r\n\r\n")[2])
        time.sleep(pause)
        while count < wanted and (piece := client.recv(1 << 16)):
            count += len(piece)
    return wanted, count


@pytest.mark.faults
def test_regular_expressions_of_tokenizers_end(note: Note, tmp_path: Path) -> None:
    begun = time.monotonic()
    cases = [
        ("(a+)+$", "a" * 2000 + "!"),
        ("(a|aa)+$", "a" * 2000 + "!"),
        ("(a+)+b", ("a" * 20 + "!") * 2000),
    ]
    for expression, text in cases:
        with pytest.raises(DataError, match="a regular expression in its tokenizer"):
            split_by(expression, tmp_path).encode([text])
    seconds = time.monotonic() - begun
    row = {"tried": len(cases), "refused": len(cases), "seconds together": round(seconds, 1)}
    note("regular expressions of tokenizers without an end", **row)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "recorded", [pytest.param(False, marks=pytest.mark.sweep), pytest.param(True, marks=pytest.mark.faults)]
)
def test_a_server_outlives_clients_and_templates(note: Note, recorded: bool, tmp_path: Path) -> None:
    times, pause = (2, 12.0) if recorded else (1, 0.1)
    rows: dict[str, dict[str, Any]] = {}
    with served(_folder(tmp_path), "slots=4", "waiting=8") as running:
        for _ in range(times):
            for said in ("loop", "long", "deep"):
                chat = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
                status, answer, _ = running.ask("/v1/chat/completions", chat)
                assert status == 400
                assert "chat template does not take these messages" in answer["error"]["message"]
        rows["chat templates without an end"] = {"tried": 3 * times, "refused": 3 * times}
        text = "a b c d e f g h " * 6
        echo = json.dumps({"prompt": [text] * 256, "echo": True, "max_tokens": 0, "logprobs": 20}).encode()
        for closes in (False, True) * times:
            wanted, count = _slowly(running, echo, pause, closes=closes)
            assert count == wanted > 1 << 22
        rows["clients that pause while they read"] = {
            "tried": 2 * times,
            "pause in s": pause,
            "answers cut off": 0,
        }
        many = {"prompt": ["a"] * 256, "max_tokens": 2, "temperature": 0}
        for _ in range(times):
            status, answer, _ = running.ask("/v1/completions", many)
            assert status == 200
            assert {one["text"] for one in answer["choices"]} == {"bc"}
        rows["256 prompts at once, where 12 may wait"] = {"tried": times, "answered": times}
        for _ in range(times):
            bias = {"prompt": "a", "max_tokens": 1, "logit_bias": {str(n): 1 for n in range(75_000)}}
            status, answer, _ = running.ask("/v1/completions", bias)
            assert (status, "at most 300" in answer["error"]["message"]) == (400, True)
        rows["75,000 entries of logit_bias"] = {"tried": times, "refused": times}
        assert running.gauge("worker_restarts") == 0
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
    for row, figures in rows.items():
        note(row, **figures)
