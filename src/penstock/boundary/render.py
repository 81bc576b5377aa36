"""The process that renders chat templates, which come from outside: this file is run as a program.

Jinja's sandbox keeps a template from Python's internals, but not from endless loops or texts. Limits of processor time
and memory end this process, and nothing else. This file imports nothing of Penstock, to start fast.

It reads requests, a line of JSON each, from standard input: `template`, `values` and `seconds`. It answers each with a
line: `{"text": …}`, or `{"problem": …}`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from functools import lru_cache, partial
from typing import Any

MEMORY_BYTES = 1 << 29
_MEMORY = "it needs more than 512 MiB of memory"
TEXT_CHARACTERS = 1 << 24


class _Refused(Exception):
    """The template refuses messages itself."""


def _refuse(why: str) -> None:
    raise _Refused(why)


@lru_cache(maxsize=16)
def _compiled(text: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    # transformers' own tag marks the model's answers, for training.
    text = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", text)
    text = re.sub(r"({%-?\s*)endgeneration(\s*-?%})", r"\1endif\2", text)
    return environment.from_string(text)


def _reason(problem: Exception, endless: str) -> str:
    if isinstance(problem, MemoryError):
        return _MEMORY
    return endless if isinstance(problem, RecursionError) else str(problem).rstrip(".")


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        template = _compiled(request["template"])
    except Exception as problem:  # noqa: BLE001 (Jinja compiles it to Python, which may fail anyhow)
        return {"unusable": _reason(problem, "it is nested too deeply")}
    if request["values"] is None:
        return {"text": ""}
    try:
        text = template.render(request["values"])
    except _Refused as problem:
        return {"problem": str(problem)}
    except Exception as problem:  # noqa: BLE001 (a template may raise anything)
        return {"problem": _reason(problem, "it calls itself without end")}
    if len(text) > TEXT_CHARACTERS:
        return {
            "problem": f"it makes a text of {len(text):,} characters, and at most {TEXT_CHARACTERS:,} are accepted"
        }
    return {"text": text}


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, whatever it is in the middle of
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(1, "w", buffering=1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            answer = json.dumps(_answer(request))
        except MemoryError:
            answer = json.dumps({"problem": _MEMORY})
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
