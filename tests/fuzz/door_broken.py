"""A door that fails in every way, to see that the room notices. It is not enrolled."""

from __future__ import annotations

import os
import signal
import time

from fuzz.doors import Door
from penstock.errors import DataError


def _enter(name: str, data: bytes) -> None:
    if data != b"good" and os.environ.get("PENSTOCK_FUZZ_BROKEN"):
        data = os.environ["PENSTOCK_FUZZ_BROKEN"].encode()
    match data:
        case b"traceback":
            raise KeyError("x")
        case b"mumble":
            raise DataError("bad")
        case b"escape":
            raise DataError("The name \x1b[2J is not allowed.")
        case b"slow":
            start = time.process_time()
            while time.process_time() < start + 0.3:
                pass
        case b"flood":
            len(b"x" * int(7e8))
        case b"deluge":
            bytes(2_000_000_000)
        case b"hang":
            signal.alarm(1)  # the room's own patience is a minute
            os.read(os.pipe()[0], 1)
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"good":
            return
    raise DataError("This is a sentence that says what to do.")


DOORS = {"broken": Door(seeds=lambda: {"good": b"good"}, enter=_enter)}
