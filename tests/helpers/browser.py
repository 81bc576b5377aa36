"""A headless Chromium that a test drives over a pipe by the DevTools protocol: `with Browser(folder) as page`."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--window-size=1100,2400",
)  # fmt: skip


class Browser:
    """One page. `profile` is an empty folder that the browser keeps its own files in."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        def connect() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._count, self._session = b"", 0, ""
        self.requested: list[str] = []
        """Addresses that the page asked for."""
        self.complaints: list[str] = []
        """Errors that its scripts raised or wrote."""

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._to, self._from):
            with contextlib.suppress(OSError):
                os.close(end)

    def call(self, method: str, **params: Any) -> Any:
        """The result of a method of the protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._read:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(str(params["args"]))
        return message

    def open(self, address: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} did not become true; {self.complaints}"
            time.sleep(0.1)
        return value

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))
