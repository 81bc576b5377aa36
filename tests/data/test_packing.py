from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.images import encoded, smooth, write_folder, write_tar
from penstock.config.run import DataConfig
from penstock.data import open_source, packing
from penstock.data.pack import read_manifest, verify
from penstock.data.packing import Packing, pack_source
from penstock.errors import ConfigError, DataError

SMALL = Packing(size=16, format="raw")


def shard(path: Path, labels: list[object], first: int = 0) -> Path:
    members = []
    for number, label in enumerate(labels, start=first):
        members += [(f"{number:05d}.png", encoded(smooth(20, 20, seed=number), "PNG"))]
        members += [(f"{number:05d}.cls", str(label).encode())]
    return write_tar(path, members)


def test_tar_shards_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "b.tar", [0, 3], first=2)
    shard(tmp_path / "shards" / "a.tar", [1, 0])
    packed = pack_source(tmp_path / "shards", tmp_path / "pack", SMALL)
    manifest = packed.manifests[""]
    assert (manifest.count, manifest.classes) == (4, ("0", "1", "2", "3"))
    assert packed.bytes == verify(tmp_path / "pack")
    source = open_source(DataConfig(source=f"pack:{tmp_path / 'pack'}"), split="train")
    images, labels = source.read(np.arange(4))
    assert labels.tolist() == [1, 0, 0, 3]
    for number, image in enumerate(images):
        expected = np.asarray(smooth(20, 20, seed=number).resize((16, 16)))
        assert np.abs(image.astype(int) - expected).mean() < 3


def test_tar_shards_of_names_with_train_and_val(tmp_path: Path) -> None:
    for split, labels in (("train", ["dog", "ant", "cat"]), ("val", ["cat", "dog"])):
        (tmp_path / "set" / split).mkdir(parents=True)
        shard(tmp_path / "set" / split / "0.tar", list(labels))
    pack_source(tmp_path / "set", tmp_path / "pack", SMALL)
    config = DataConfig(source=f"pack:{tmp_path / 'pack'}")
    val = open_source(config, split="val")
    assert val.classes == ("ant", "cat", "dog")
    assert val.labels.tolist() == [1, 2]
    assert open_source(config, split="train").labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("train", "val", "why"),
    [
        ([0, "cat"], None, "Some samples name their class and others number it"),
        ([1 << 20], None, "below 1,048,576"),
        ([0, 1], [2], "val set has class 2"),
        (["a"], ["b"], "classes that the train set lacks: b"),
    ],
)
def test_labels_that_differ(tmp_path: Path, train: list[object], val: list[object] | None, why: str) -> None:
    for split, labels in (("train", train), ("val", val or train)):
        (tmp_path / "set" / split).mkdir(parents=True)
        shard(tmp_path / "set" / split / "0.tar", labels)
    with pytest.raises(DataError, match=why):
        pack_source(tmp_path / "set", tmp_path / "pack", SMALL)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["set"]


def test_shards_are_cut_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHARD_BYTES", 5000)
    folder = write_folder(tmp_path / "set", per_class=10)
    pack_source(folder, tmp_path / "pack", SMALL)
    manifest = read_manifest(tmp_path / "pack")
    assert [file.bytes // 768 for file in manifest.shards] == [7, 7, 6]
    verify(tmp_path / "pack")
    config = DataConfig(source=f"pack:{tmp_path / 'pack'}")
    folder_config = DataConfig(source=f"imagefolder:{folder}")
    for split in ("train", "val"):
        ours, _ = open_source(config, split=split).read(np.arange(4))  # type: ignore[arg-type]
        theirs, _ = open_source(folder_config, split=split, image_size=14).read(np.arange(4))  # type: ignore[arg-type]
        np.testing.assert_array_equal(ours, theirs)


def test_threads_change_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", per_class=12)
    for threads in (1, 5):
        pack_source(folder, tmp_path / f"pack{threads}", Packing(size=16, threads=threads))
    one, five = (read_manifest(tmp_path / f"pack{threads}") for threads in (1, 5))
    assert one.shards == five.shards
    assert one.index == five.index


def test_bad_images_fail_or_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "set", per_class=100, size=8)
    bad = folder / "cat" / "0007.jpg"
    bad.write_bytes(bad.read_bytes()[:50])
    with pytest.raises(DataError, match=r"0007\.jpg cannot be used: .*--bad-images skip"):
        pack_source(folder, tmp_path / "pack", SMALL)
    assert not (tmp_path / "pack").exists()
    skipping = Packing(size=16, format="raw", bad_images="skip")
    with caplog.at_level(logging.WARNING):
        packed = pack_source(folder, tmp_path / "pack", skipping)
    assert (packed.manifests[""].count, packed.manifests[""].skipped) == (199, 1)
    assert str(bad) in caplog.text
    for number in (8, 9):
        (folder / "cat" / f"000{number}.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"3 of 200 images are bad, more than 1%"):
        pack_source(folder, tmp_path / "pack2", skipping)


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", per_class=1)
    (tmp_path / "pack").mkdir()
    with pytest.raises(DataError, match="exists already"):
        pack_source(folder, tmp_path / "pack", SMALL)
    with pytest.raises(DataError, match="nothing to pack"):
        pack_source(tmp_path / "nowhere", tmp_path / "pack3", SMALL)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_source(folder, tmp_path / "pack4", SMALL, progress=stop)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pack", "set"]


def test_a_killed_packing_leaves_no_pack(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", per_class=150, size=64)
    script = """
import sys, time
from penstock.data.packing import Packing, pack_source
def progress(done):
    print(done, flush=True)
    time.sleep(0.01)
pack_source(sys.argv[1], sys.argv[2], Packing(size=16), progress=progress)
"""
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "pack")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "100\n":
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "pack").exists()
    pack_source(folder, tmp_path / "pack", Packing(size=16))
    verify(tmp_path / "pack")


def test_packing_needs_no_memory_for_the_set(tmp_path: Path) -> None:
    """Twice the images must not take noticeably more memory: 64 MB of pixels are written, 16 MB may stay."""
    folder = write_folder(tmp_path / "set", per_class=2, size=64)
    small = (folder / "cat" / "0000.jpg").read_bytes()
    for number in range(2, 350):
        (folder / "cat" / f"{number:04d}.jpg").write_bytes(small)
    script = """
import sys
from penstock.data.packing import Packing, pack_source
def peak_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
before = []
def progress(done):
    if done == 20: before.append(peak_bytes())
pack_source(sys.argv[1], sys.argv[2], Packing(size=256, format="raw", threads=1), progress=progress)
print(peak_bytes() - before[0], "torch" in sys.modules)
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "pack")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    growth, torch = done.stdout.split()
    assert int(growth) < 16e6, (growth, time.monotonic() - start)
    assert torch == "False"


def test_settings_are_checked_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Packing(size=0, format="zip", quality=101)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    assert json.dumps(caught.value.problems)


@pytest.mark.parametrize(("limit", "ahead"), [(1 << 30, 32), (1 << 20, 3), (1, 1)])
def test_what_is_in_flight_is_limited_in_bytes_too(
    limit: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of 300 pixels takes 270 kB and a little, so three of them fit into a megabyte."""
    monkeypatch.setattr(packing, "IN_FLIGHT_BYTES", limit)
    image, taken = encoded(smooth(300, 300)), 0

    def samples() -> Iterator[packing.Sample]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield packing.Sample(image, number, str(number))

    most = 0
    for number, done in enumerate(packing._in_threads(samples(), Packing(size=16, threads=8))):
        assert isinstance(done, packing.Sample)
        assert done.label == number
        most = max(most, taken - number - 1)
    assert most == ahead


def test_a_pack_of_deep_images_knows_their_range(tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    for number in range(5):
        Image.fromarray(np.full((8, 8), 2048, np.uint16)).save(tmp_path / "set" / "a" / f"{number}.png")
    with pytest.raises(DataError, match="does not say which value is white"):
        pack_source(tmp_path / "set", tmp_path / "none", Packing(size=8))
    pack_source(tmp_path / "set", tmp_path / "pack", Packing(size=8, format="raw", range=4095))
    source = open_source(DataConfig(source=f"pack:{tmp_path}/pack"), split="train")
    assert source.white == 4095
    assert source.read(np.array([0]))[0].mean() == 128
