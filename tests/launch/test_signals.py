"""Being asked to stop is noted, not died of, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.launch.signals import Requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Requests() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.signal is number
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with Requests() as stop:
            seen.append((stop.signal, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
