"""`penstock push` to a hub on 127.0.0.1, which answers huggingface_hub's own requests and keeps what it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """A hub with one user, to whom models belong that begin with `somebody/`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.large: dict[str, bytes] = {}
        """Contents of large files by their SHA-256."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def do_PUT(self) -> None:
        body = self._body()
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self._answer(200, {})

    def do_POST(self) -> None:
        hub, path, body = self.server, self.path, self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if not name.startswith("somebody/"):
                self._answer(
                    403, {"error": "You don't have the rights to create a model under this namespace"}
                )
                return
            known = name in hub.private
            hub.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private") is True)
            self._answer(409 if known else 200, {"url": f"{hub.address}/{name}", "name": name})
        elif path == "/api/validate-yaml":  # the head of a model card
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [{"path": f["path"], "shouldIgnore": False, "uploadMode": _mode(f["path"])}
                     for f in json.loads(body)["files"]]  # fmt: skip
            self._answer(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": one["oid"], "size": one["size"],
                 "actions": {"upload": {"href": f"{hub.address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]  # fmt: skip
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append(value["summary"])
                elif line["key"] == "file":
                    hub.files.setdefault(name, {})[value["path"]] = base64.b64decode(value["content"])
                else:
                    hub.files.setdefault(name, {})[value["path"]] = hub.large[value["oid"]]
            self._answer(200, {"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1" * 40})
        else:
            self._answer(404, {"error": f"no such route: {path}"})


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # Its protocol for large files has servers of its own.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


FILES = {
    "config.json": b"{}", "README.md": b"# A model", "tokenizer.json": b"{ }", "model.safetensors": bytes(range(256)),
    "1_Pooling/config.json": b"[]",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with things in its export that are no part of the model."""
    others = {
        "optimizer.pt": b"1",
        "trainer_state.json": b"{}",
        "checkpoint-5/config.json": b"{}",
        ".notes": b"1",
    }
    for name, content in (FILES | others).items():
        path = tmp_path / "run" / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "run"


def test_a_run_is_pushed_and_pushed_again(served: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["push", str(run), "somebody/digits", "--endpoint", served.address]
    assert main([*words, "--private"]) == 0
    out, told = capsys.readouterr()
    assert out == f"{run / 'export'} is now {served.address}/somebody/digits\n"
    assert (
        "Left out, because a model does not need it: checkpoint-5/config.json, optimizer.pt, trainer_state.json"
        in told
    )
    assert "no model card" not in told
    assert served.files == {"somebody/digits": FILES}
    assert served.private == {"somebody/digits": True}
    (run / "export" / "README.md").unlink()
    (run / "export" / "config.json").write_bytes(b"{\n}")
    assert main([*words, "--message", "Train longer"]) == 0
    assert "no model card" in capsys.readouterr().err
    assert served.files["somebody/digits"]["config.json"] == b"{\n}"
    assert served.commits == ["Upload a model with Penstock", "Train longer"]


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("digits", TOKEN, "write OWNER/NAME"),
        ("nobody/digits", TOKEN, "does not let you write to nobody/digits. Log in with `hf auth login`"),
        ("somebody/digits", "hf_other", "does not let you write to somebody/digits"),
    ],
)
def test_who_may_not_is_told_what_to_do(
    name: str, token: str, said: str, served: Hub, run: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    assert main(["push", str(run), name, "--endpoint", served.address]) != 0
    assert said in capsys.readouterr().err
    assert not served.files


def test_what_is_no_model_is_refused(run: Path, capsys: pytest.CaptureFixture[str], served: Hub) -> None:
    (run / "export" / "model.safetensors").unlink()
    assert main(["push", str(run), "somebody/digits", "--endpoint", served.address]) == 2
    assert "holds no model" in capsys.readouterr().err
    assert main(["push", "nowhere", "somebody/digits"]) == 2
    assert "The folder nowhere holds no model" in capsys.readouterr().err


def test_a_hub_that_is_not_there_is_said(run: Path, capsys: pytest.CaptureFixture[str], served: Hub) -> None:
    served.server_close()
    assert main(["push", str(run), "somebody/digits", "--endpoint", "http://127.0.0.1:9"]) == 3
    assert "could not be uploaded to somebody/digits" in capsys.readouterr().err
