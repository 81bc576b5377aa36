"""Kept memory is not faulted in again; released memory is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import process
from penstock.errors import EnvironmentProblem

_COUNT_FAULTS = """
import resource, sys, torch
from penstock.process import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(4_000_000) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory(True)
faults()
kept = faults()
keep_freed_memory(False)
released = faults()
keep_freed_memory(True)
faults()
print(kept, released, faults())
"""


def test_kept_memory_is_mapped_once() -> None:
    if process.unavailable():
        pytest.skip("this host's allocator is not glibc's")
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS], capture_output=True, text=True, check=True)
    kept, released, kept_again = map(int, done.stdout.split())
    pages = 4 * 8 * 4_000_000 * 4 // 4096
    assert kept < pages // 100
    assert kept_again < pages // 100
    assert released > pages // 10


def test_other_allocators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_glibc", lambda: None)
    with pytest.raises(EnvironmentProblem, match="use 'release'"):
        process.keep_freed_memory(True)


def test_settling_acts_only_on_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(process, "_kept", False)
    monkeypatch.setattr(process, "keep_freed_memory", calls.append)
    changes = [process.set_host_memory(keep=keep) for keep in (False, True, True, False, False)]
    assert changes == [False, True, False, True, False]
    assert calls == [True, False]
