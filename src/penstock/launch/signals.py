"""What the agent itself is asked by signals."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

_NOTED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Asked(BaseException):
    """A signal came while the agent waited for other agents, where nothing can be forwarded yet."""


class Requests:
    """While entered, notes SIGTERM, SIGUSR1 and SIGINT instead of dying of them. Outside the main thread, nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first that came: how the run was asked to stop, if it was."""
        self._pending: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._raises = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _NOTED:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def take(self) -> list[signal.Signals]:
        """What came since the last call, to be forwarded: every one, for a second one may mean more than the first."""
        taken, self._pending = self._pending, []
        return taken

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a signal raises `Asked` instead of being kept; one that is pending does so at once."""
        self._raises = True
        try:
            if self.signal is not None:
                raise Asked
            yield
        finally:
            self._raises = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        self._pending.append(signal.Signals(number))
        if self._raises:
            raise Asked
