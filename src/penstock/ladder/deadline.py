"""Stopping what takes longer than its time: a compilation begun on a forecast of seconds may take minutes."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import PenstockError

_SIGNAL = signal.SIGUSR2
_AGAIN = 1.0
"""Seconds between two attempts to stop: code that swallows every exception is asked again."""


class OutOfTime(PenstockError):
    """The block was stopped because its time was over."""


class _Stop(BaseException):
    """Raised in the block; no `except Exception` inside it takes it for a failure of its own."""


@contextmanager
def stopped_at(end: float, what: str) -> Iterator[None]:
    """Raise OutOfTime with `what` as its message from the block if it still runs at `end` (`time.perf_counter()`).

    Python runs signal handlers in the main thread only, so that a block in another thread is not stopped.
    """
    if math.isinf(end) or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.get_ident(), threading.Event()

    def stop(*_: Any) -> None:
        if not over.is_set():
            raise _Stop

    def watch() -> None:
        wait = max(0.1, end - time.perf_counter())  # not before the block has begun
        while not over.wait(wait):
            signal.pthread_kill(main, _SIGNAL)
            wait = _AGAIN

    before = signal.signal(_SIGNAL, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            over.set()
    except _Stop:
        raise OutOfTime(what) from None
    finally:
        watcher.join()
        signal.signal(_SIGNAL, before)
