"""What killed processes leave is swept by the next; what a live one uses is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.leftovers import make_public, temporary

_MAKER = """
import sys, time
from pathlib import Path
from penstock.leftovers import temporary
with temporary(Path(sys.argv[1]), "mine-", folder=sys.argv[2] == "folder") as path:
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_the_dead_left_is_swept_and_what_the_living_use_is_not(tmp_path: Path, kind: str) -> None:
    folder = kind == "folder"
    (tmp_path / "mine").mkdir()
    (tmp_path / "other-1").mkdir()
    command = [sys.executable, "-c", _MAKER, str(tmp_path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        theirs = Path(maker.stdout.readline().strip())
        if folder:
            (theirs / "part").touch()
        with temporary(tmp_path, "mine-", folder=folder):
            assert theirs.exists(), "its maker is alive"
        os.kill(maker.pid, signal.SIGKILL)
        maker.wait()
    assert theirs.exists()
    with temporary(tmp_path, "mine-", folder=folder) as path:
        assert path.is_dir() is folder
        assert not theirs.exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "other-1"]


def test_links_are_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "mine-link").symlink_to(tmp_path / "kept")
    with temporary(tmp_path, "mine-"):
        pass
    assert (tmp_path / "mine-link").is_symlink()
    assert (tmp_path / "kept").is_dir()


def test_what_is_renamed_stays_and_is_as_public_as_any(tmp_path: Path) -> None:
    with temporary(tmp_path, "mine-") as path:
        make_public(path)
        path.rename(tmp_path / "done")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "done").stat().st_mode == (tmp_path / "plain").stat().st_mode
