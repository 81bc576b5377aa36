"""Two runs never share a directory, and a dead one never blocks it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import EnvironmentProblem
from penstock.train.lock import RunLock

_HOLD = """
import sys, time
from pathlib import Path
from penstock.train.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_and_its_death_frees_the_directory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentProblem, match=f"process {other.pid} on") as caught, RunLock(tmp_path):
            pass
        assert caught.value.exit_code == 3
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / "lock").read_text()
    with RunLock(tmp_path):
        pass
    assert not (tmp_path / "lock").read_text()


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()}"), RunLock(tmp_path / "." / ""):
            pass
        with pytest.raises(EnvironmentProblem), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass


def test_another_host_is_respected_while_it_shows_life(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"pid": 7, "host": "node-12"}))
    with pytest.raises(EnvironmentProblem, match="process 7 on node-12"), RunLock(tmp_path):
        pass
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    with RunLock(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_touching_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path) as held:
        os.utime(tmp_path / "lock", (1, 1))
        held.touch()
        assert (tmp_path / "lock").stat().st_mtime == 1
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 30)
        held.touch()
        assert (tmp_path / "lock").stat().st_mtime > 1e9
