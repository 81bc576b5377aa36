"""Calls that may never end, each in a thread of its own. torch's store waits for its host for minutes where the network
has vanished, and no signal interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.launch.signals import STOPS

T = TypeVar("T")


class Call(Generic[T]):
    """`function` in a thread of its own. A process that ends does not wait for it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._values: list[T] = []
        self._problem: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="penstock-store", daemon=True).start()

    def wait(self, seconds: float = 0.0) -> bool:
        """Whether it has ended after `seconds` more."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """The value it returned, once it has ended. Raises its error."""
        if self._problem is not None:
            raise self._problem
        return self._values[0]

    def _run(self) -> None:
        # Else a signal may reach this thread, and the main one, which handles it, sleeps on.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGINT))
        try:
            self._values.append(self._function())
        except BaseException as problem:  # noqa: BLE001  # raised again by `result`
            self._problem = problem
        self._ended.set()
