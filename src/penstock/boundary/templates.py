"""Rendering of templates from outside, in a process with little time and little memory."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

SECONDS = 2.0
"""Processor time for one text."""
_PROGRAM = Path(__file__).with_name("render.py")


class _Renderer:
    """The process that renders. It starts with the first text, and again after a template has ended it. A forked
    process starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """The answer to a request; empty if the request ended the process."""
        if self._owner != os.getpid():  # another thread may have held the lock when this process was forked
            self._lock, self._process, self._owner = threading.Lock(), None, os.getpid()
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # such as Ctrl-C: the next request would get this answer
                self._end()
                raise
            if not answer:
                self._end()
                return {}
        table: dict[str, str] = json.loads(answer)
        return table

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


_RENDERER = _Renderer()
atexit.register(_RENDERER._end)


def check_template(template: str) -> None:
    """Raise ConfigError for a text that is not a template."""
    _answer(template, None)


def render(template: str, values: dict[str, Any]) -> str:
    """Render a template with values. Raises ConfigError for a template that does not accept them, or that needs more
    than `SECONDS`, 512 MiB or 2²⁴ characters."""
    return _answer(template, values)


def _answer(template: str, values: dict[str, Any] | None) -> str:
    answer = _RENDERER.ask({"template": template, "values": values, "seconds": SECONDS})
    if "unusable" in answer:
        raise ConfigError(f"The model's chat template cannot be used: {answer['unusable']}.")
    if "text" in answer:
        return answer["text"]
    problem = answer.get("problem", f"it does not end within {SECONDS:g} s of processor time")
    raise ConfigError(f"The model's chat template does not take these messages: {problem}.")
