"""Two runs never share a directory, and a dead one never blocks it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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


def test_another_host_is_respected_while_it_shows_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "lock"
    lock.write_text(json.dumps({"pid": 7, "host": "node-12"}))
    run = RunLock(tmp_path)
    assert not run.hold()
    assert "in use by process 7 on node-12 0 s ago. Waiting 120 s for its lock to lapse" in caplog.text
    os.utime(lock, (time.time() + 1, time.time() + 1))
    with pytest.raises(EnvironmentProblem, match="process 7 on node-12"):
        run.hold()
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


def test_a_dead_host_is_waited_for_until_its_lock_lapses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "node-12"}))
    slept: list[float] = []
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 30 * len(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    with RunLock(tmp_path):
        assert len(slept) == 4


def test_a_later_life_of_the_same_launch_takes_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(launch: str, life: int, host: str) -> RunLock:
        monkeypatch.setenv("PENSTOCK_LAUNCH", launch)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(life))
        monkeypatch.setattr("socket.gethostname", lambda: host)
        return RunLock(tmp_path)

    first = started("abc", 1, "node-a")
    assert first.hold()
    left = (tmp_path / "lock").read_bytes()
    first.__exit__()
    for launch, life, taken in (("abc", 1, False), ("xyz", 2, False), ("", 2, False), ("abc", 2, True)):
        (tmp_path / "lock").write_bytes(left)
        run = started(launch, life, "node-b")
        assert run.hold() == taken, (launch, life)
        run.__exit__()


def test_who_was_taken_for_dead_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path) as held:
        (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "node-12"}))
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 30)
        with pytest.raises(EnvironmentProblem, match="process 7 on node-12"):
            held.touch()
    assert (tmp_path / "lock").read_text(), "it is the other's now"


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_another_file_is_not_emptied(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    (precious := tmp_path / "precious").write_text("text")
    (folder := tmp_path / "run").mkdir()
    make(folder / "lock", precious)
    with pytest.raises(EnvironmentProblem, match="Remove"), RunLock(folder):
        pass
    assert precious.read_text() == "text"
