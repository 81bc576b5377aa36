"""What others own or may write is not trusted, and caches that are not trusted are not used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.boundary.owners import distrust
from penstock.config import gains
from penstock.config.machine import cache_folder, cache_path, cached_machine, load_machine, save_machine
from penstock.kernels import native

STRANGER = 54321


def test_only_what_this_user_alone_can_write_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    file = folder / "file"
    assert not distrust(file), "nothing is there yet"
    file.touch(mode=0o600)
    assert not distrust(file)
    (tmp_path / "link").symlink_to(folder)
    for changed, mode in ((file, 0o602), (folder, 0o702), (folder, 0o1702)):
        before = changed.stat().st_mode
        changed.chmod(mode)
        for way in (file, tmp_path / "link" / "file"):  # others can replace nothing in a sticky folder
            assert distrust(way).startswith("other users may write") != bool(mode & 0o1000)
        assert f"other users may write {changed} (`chmod go-w" in distrust(changed)
        changed.chmod(before)
    assert not distrust(tmp_path / "link" / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_what_belongs_to_others_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    for changed, way in ((folder, folder / "file"), (tmp_path / "link", tmp_path / "link" / "file")):
        os.chown(changed, STRANGER, -1, follow_symlinks=False)
        assert distrust(way) == f"{changed} belongs to user {STRANGER}"
        os.chown(changed, 0, -1, follow_symlinks=False)
        assert not distrust(way)


def test_measurements_that_others_may_write_are_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    machine, path = load_machine("a100-80g"), cache_path("desk")
    save_machine(machine, path)
    table = gains.store("desk", {"norm": {"rms": {"bfloat16": {"eager": 9.0}}}})
    assert cached_machine("desk") == machine
    assert gains.gains_of("desk")
    for file in (path, table):
        file.chmod(0o666)
        assert json.loads(file.read_text())
    assert cached_machine("desk") is None
    assert cached_machine() is None
    assert not gains.gains_of("desk")
    assert f"{path} is not used, because other users may write {path}" in caplog.text


def test_a_library_that_others_may_write_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    compiled: list[Path] = []

    def compile_(compiler: str, flags: tuple[str, ...], source: Path, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.write_text("ours")
        compiled.append(path)

    monkeypatch.setattr(native, "_compile", compile_)
    monkeypatch.setattr(native, "_compiler", lambda: "true")
    library = native._built("fused")
    assert native._built("fused") == library
    assert compiled == [library]
    library.write_text("planted")
    library.chmod(0o777)
    assert native._built("fused").read_text() == "ours"
    assert compiled == [library] * 2


def test_another_folder_stands_in_for_a_cache_that_others_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for number, changed in enumerate(("", "native")):
        cache = tmp_path / str(number)
        (cache / "native").mkdir(parents=True)
        (cache / changed).chmod(0o777)
        monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
        own = tmp_path / f"penstock-{os.geteuid()}"
        assert cache_folder("native") == own / "native"
        assert (
            f"The cache {cache / 'native'} is not used, because other users may write {cache / changed}"
            in caplog.text
        )
    assert own.stat().st_mode & 0o777 == 0o700
