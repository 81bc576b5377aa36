"""A server in a process of its own, for tests: `python -m helpers.served FOLDER OPENER NAME=VALUE…`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass
class Running:
    """A server that listens."""

    process: subprocess.Popen[str]
    port: int
    key: str = ""
    """The key that it asks for, which requests send unless they have another."""

    def ask(
        self, path: str, body: Any = None, *, key: str | None = None, timeout: float = 60.0
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (JSON where it is) and headers of an answer; POST with a body, else GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        key = self.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("GET" if body is None else "POST", path, raw, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text), dict(answer.getheaders())
        return answer.status, text, dict(answer.getheaders())

    def preflight(self, path: str, origin: str) -> dict[str, str]:
        """Headers of the answer to a browser that asks whether a page of an origin may call."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        asks = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x",
        }
        connection.request("OPTIONS", path, headers=asks)
        headers = dict(connection.getresponse().getheaders())
        connection.close()
        return headers

    def gauge(self, name: str) -> float:
        """What /metrics says."""
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"penstock_{name}"))

    def until(self, name: str, value: float, seconds: float = 20.0) -> None:
        """Wait until /metrics says so."""
        end = time.monotonic() + seconds
        while self.gauge(name) != value:
            assert time.monotonic() < end, f"{name} is {self.gauge(name)}, not {value}"
            time.sleep(0.02)


@contextlib.contextmanager
def served(folder: Path, *settings: str, opener: str = "helpers.fake_engine:opened") -> Iterator[Running]:
    """A server of `folder`, which must not have ended by itself when the block ends."""
    command = [sys.executable, "-m", "helpers.served", str(folder), opener, "port=0", *settings]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=TESTS
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "/v1" in line, f"the server said {line!r} and ended with {process.poll()}"
        key = next((word.removeprefix("key=") for word in settings if word.startswith("key=")), "")
        yield Running(process, int(line.partition("/v1")[0].rpartition(":")[2]), key)
    finally:
        process.terminate()
        try:
            process.wait(60)  # on a busy machine
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()


if __name__ == "__main__":
    from penstock.config.load import load
    from penstock.serve.serve import serve
    from penstock.serve.settings import ServeConfig

    given = dict(word.split("=", 1) for word in sys.argv[3:])
    key = given.pop("key", None)
    config = load(ServeConfig, overrides={"model": sys.argv[1], **given})
    serve(config, key=key, tell=lambda line: print(line, flush=True), opener=sys.argv[2])
