"""Signals that ask an agent or a training run to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Self

STOPS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send: SIGTERM, and SIGUSR1 as Slurm's warning before preemption."""
_ONCE = b"\nCtrl-C: the step under way is finished and saved. Press it again to end at once.\n"


class StopRequested(BaseException):
    """A signal came while the agent waited for other agents and had no rank to forward it to."""


@contextlib.contextmanager
def throughout() -> Iterator[None]:
    """For a command that owns the process. Inside, requests to stop are recorded even while no `Requests` is entered;
    afterwards they are ignored, because the process only has to end. Otherwise Python would restore the signals'
    default, which kills the process, before the last libraries are closed.
    """
    Requests().__enter__()  # never exited
    try:
        yield
    finally:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)


class Requests:
    """Records every signal of `numbers` inside the context, so that none ends the process. A nested object takes over
    the signals that the outer object has recorded.

    Only the main thread can handle signals; elsewhere nothing is installed. With `interactive`, the first Ctrl-C is
    answered in the terminal, and a Ctrl-C after another request raises KeyboardInterrupt.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = STOPS, *, interactive: bool = False) -> None:
        self._numbers = numbers
        self._interactive = interactive
        self.signal: signal.Signals | None = None
        """The first signal that came, if any: how the run was asked to stop."""
        self._pending: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._raises = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = before = signal.signal(number, self._note)
                outer = getattr(before, "__self__", None)
                if isinstance(outer, Requests) and outer.signal is not None:
                    self.signal, self._pending = self.signal or outer.signal, self._pending or outer.take()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def take(self) -> list[signal.Signals]:
        """All signals since the last call, to be forwarded: a second signal may mean more than the first."""
        taken, self._pending = self._pending, []
        return taken

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `StopRequested` inside the context on a signal; at once if a signal came before."""
        self._raises = True
        try:
            if self.signal is not None:
                raise StopRequested
            yield
        finally:
            self._raises = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interactive and number == signal.SIGINT:
            if self.signal is not None:
                raise KeyboardInterrupt
            os.write(2, _ONCE)  # immediately, even while the program is printing
        self.signal = self.signal or signal.Signals(number)
        self._pending.append(signal.Signals(number))
        if self._raises:
            raise StopRequested
