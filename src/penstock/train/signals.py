"""Being asked to stop: SIGTERM (schedulers) and SIGUSR1 (Slurm's warning before preemption)."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered, notes that one of the signals came instead of dying of it.

    A second one during the save changes nothing: the save goes on. Outside the main thread Python cannot
    handle signals, and nothing is installed.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
