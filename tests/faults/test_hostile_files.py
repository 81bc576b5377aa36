"""Files made to harm, from wherever a run reads: nothing runs, nothing is written outside, and each is refused by name.

What each reader refuses in detail is tested beside it; here every door is tried with the same payload, and the figures
go to benchmarks/results/faults_files.json.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import Payload, numbered, seal
from helpers.images import encoded, smooth, write_folder
from helpers.native_kernels import needs_compiler
from helpers.rows import Note
from penstock import checkpoint
from penstock.boundary.manifests import sealed
from penstock.checkpoint.manifest import MANIFEST
from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.data import open_source
from penstock.data.packing import Packing, pack_source
from penstock.data.tar import read_tar
from penstock.disk import digest_file
from penstock.errors import CheckpointError, ConfigError, DataError, EnvironmentProblem, PenstockError
from penstock.kernels import native
from penstock.launch.signals import Requests
from penstock.models.convert.files import read_state_dict
from penstock.parallel import joined
from penstock.train import resume

Case = tuple[str, Callable[[], object], type[PenstockError]]
"""Kind, how it is read, what must be raised."""


def payloads(marker: Path) -> dict[str, bytes]:
    """The payload in every coat."""
    plain = pickle.dumps(Payload(marker))
    zipped, array = io.BytesIO(), io.BytesIO()
    torch.save(Payload(marker), zipped)
    evil = np.empty(1, object)
    evil[0] = Payload(marker)
    np.save(array, evil, allow_pickle=True)
    header = struct.pack("<Q", len(plain)) + plain
    return {"pickle": plain, "torch.save": zipped.getvalue(), "npy": array.getvalue(), "safetensors": header}


def checkpoint_cases(folder: Path, coats: dict[str, bytes]) -> list[Case]:
    """The payload in place of every file of a checkpoint, under a wrong seal and a right one, and beside them under
    DCP's names."""
    cases: list[Case] = []
    original = checkpoint.save(folder / "original", numbered(2))
    names = sorted(file.name for file in original.iterdir())
    assert {"random.safetensors", "local.json", MANIFEST} <= set(names), "random states are among them"
    places = [*names, ".metadata", "__0_0.distcp", "rng.pt", "state.npy", "weights.bin"]
    for coat, content in coats.items():
        for place in places:
            for sealed_again in (False, True):
                step = folder / f"{coat}-{place}-{sealed_again}" / "step-2"
                step.mkdir(parents=True)
                for file in original.iterdir():
                    (step / file.name).write_bytes(file.read_bytes())
                (step / place).write_bytes(content)
                if sealed_again and place != MANIFEST:
                    seal(step)
                read = partial(checkpoint.load, step)
                cases.append(("pickle in a checkpoint", read, CheckpointError))
    return cases


def pack_cases(folder: Path, coats: dict[str, bytes]) -> list[Case]:
    """The payload as the index of a pack, with the manifest made right."""
    write_folder(folder / "images", per_class=4)
    cases: list[Case] = []
    for coat, content in coats.items():
        pack = folder / f"pack-{coat}"
        pack_source(folder / "images", pack, Packing(size=32, format="raw"))
        root = next(pack.rglob("index.npy")).parent
        (root / "index.npy").write_bytes(content)
        manifest = json.loads((root / "manifest.json").read_text())
        manifest["index"].update(bytes=len(content), sha256=digest_file(root / "index.npy"))
        (root / "manifest.json").write_bytes(sealed(manifest))
        config = DataConfig(source=f"pack:{pack}")
        cases.append(("pickle in a pack", lambda c=config: open_source(c, split="train"), DataError))  # type: ignore[misc]
    return cases


def tar_cases(folder: Path, coats: dict[str, bytes]) -> list[Case]:
    """Members that lead outside, links, devices, and pickles."""
    image = encoded(smooth(20, 20))
    outside = ("../evil.jpg", "a/../../evil.jpg", "/tmp/evil.jpg", "..\\evil.jpg")
    members = [(tarfile.TarInfo(name), image) for name in outside]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        link = tarfile.TarInfo("k.jpg")
        link.type, link.linkname = kind, "../evil.jpg"
        members.append((link, b""))
    suffixes = ("pkl", "pickle", "pyd", "pth", "npy")
    members += [(tarfile.TarInfo(f"k.{suffix}"), coats["pickle"]) for suffix in suffixes]
    cases: list[Case] = []
    for number, (member, content) in enumerate(members):
        shard = folder / f"{number}.tar"
        with tarfile.open(shard, "w") as opened:
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
        cases.append(("tar member", lambda shard=shard: list(read_tar(shard)), DataError))
    return cases


def safetensors_cases(folder: Path, coats: dict[str, bytes]) -> list[Case]:
    """Headers that lie, indexes that point elsewhere, pickles under another name."""
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    lies: list[bytes] = [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100_000_001) + b"{" + b" " * 1000,
        _file({"a": one, "b": one}, 8),
        _file({"a": one, "b": {**one, "data_offsets": [4, 12]}}, 12),
        _file({"a": {**one, "data_offsets": [8, 16]}}, 16),
        _file({"a": {**one, "shape": [2**40, 2**40]}}, 8),
        _file({"a": {**one, "data_offsets": [-8, 0]}}, 8),
        coats["safetensors"],
        coats["pickle"],
    ]
    cases: list[Case] = []
    for number, content in enumerate(lies):
        file = folder / f"{number}.safetensors"
        file.write_bytes(content)
        cases.append(("safetensors header", lambda file=file: read_state_dict(file), CheckpointError))
    (folder / "outside.safetensors").write_bytes(_file({"a": one}, 8))
    for number, target in enumerate(("../outside.safetensors", str(folder / "outside.safetensors"))):
        root = folder / f"indexed-{number}"
        root.mkdir()
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
        cases.append(("safetensors index", lambda root=root: read_state_dict(root), CheckpointError))
    for name in ("pytorch_model.bin", "weights.pt"):
        (folder / name).write_bytes(coats["torch.save"])
        cases.append(("pickle as weights", lambda path=folder / name: read_state_dict(path), ConfigError))  # type: ignore[misc]
    return cases


def _file(header: dict[str, Any], data: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_nothing_runs_nothing_is_written_and_every_file_is_refused(
    note: Note, tmp_path: Path, recorded: bool
) -> None:
    marker = tmp_path / "harm"
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload would harm"
    marker.unlink()
    coats = payloads(marker)
    cases: list[Case] = []
    for make in (checkpoint_cases, pack_cases, tar_cases, safetensors_cases):
        (tmp_path / make.__name__).mkdir()
        cases += make(tmp_path / make.__name__, coats)
    before, refused = everything_in(tmp_path), Counter[str]()
    for kind, read, expected in cases:
        with pytest.raises(expected):
            read()
        refused[kind] += 1
        assert not marker.exists(), kind
    assert everything_in(tmp_path) == before
    assert len(cases) > 80
    note("files made to harm", tried=len(cases), refused=refused, executed=0, written=0)


@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_run_whose_files_are_links_changes_none_of_their_targets(
    note: Note, tmp_path: Path, recorded: bool
) -> None:
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("text")
    names = ["lock", *resume._WRITTEN]
    for number, name in enumerate(names):
        link = tmp_path / str(number) / name
        link.parent.mkdir(parents=True)
        link.symlink_to(precious / "file" if link.suffix or name == "lock" else precious)
        with (
            joined(Plan(), torch.device("cpu"), timeout=5.0) as dims,
            pytest.raises(EnvironmentProblem, match="is a link to"),
            resume.hold_output(tmp_path / str(number), Requests(), dims),
        ):
            pass
    assert [path.read_text() for path in precious.iterdir()] == ["text"]
    note("files and folders of a run that are links", tried=len(names), refused=len(names), changed=0)


@needs_compiler
@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_planted_kernels_do_not_run(
    note: Note, tmp_path: Path, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    marker, planted = tmp_path / "ran", tmp_path / "planted.so"
    source = (
        f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fopen("{marker}", "w"); }}\n'
    )
    command = [native._compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(planted)]
    subprocess.run(command, input=source.encode(), check=True)
    compiled: list[Path] = []

    def compile_(*_: object) -> None:
        compiled.append(path)
        path.unlink()  # for the next case
        raise native._CannotBuild

    path = tmp_path / "cache" / "native" / native._built("losses").name
    monkeypatch.setattr(native, "_compile", compile_)
    ways: list[Callable[[], object]] = [lambda: path.chmod(0o777), lambda: path.chmod(0o606)]
    if os.geteuid() == 0:
        ways += [lambda: os.chown(path, 54321, -1), lambda: os.chown(path, 54321, 54321)]
    for spoil in ways:
        path.unlink(missing_ok=True)
        shutil.copy(planted, path)
        path.chmod(0o700)
        spoil()
        assert native.library.__wrapped__("losses") is None
        assert not marker.exists()
    assert len(compiled) == len(ways), "each would have been compiled again"
    ctypes.CDLL(str(planted))
    assert marker.exists(), "it would run"
    note("kernels that others own or may write", tried=len(ways), loaded=0)
