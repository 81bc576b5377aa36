from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.images import encoded, photo, write_folder
from penstock.config.run import DataConfig
from penstock.data import Source, open_source
from penstock.data.imagefolder import ImageFolder, list_classes
from penstock.data.packing import Packing, pack_source
from penstock.errors import DataError


def opened(root: Path, split: str = "train", **config: object) -> Source:
    return open_source(DataConfig(source=f"imagefolder:{root}", **config), split=split, image_size=28)  # type: ignore[arg-type]


def test_a_folder_is_split_by_fifths_of_each_class(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", per_class=11)
    train, val = opened(root), opened(root, "val")
    assert (len(train), len(val)) == (18, 4)
    assert train.classes == val.classes == ("cat", "dog")
    assert np.bincount(val.labels).tolist() == [2, 2]
    assert isinstance(train, ImageFolder)
    assert isinstance(val, ImageFolder)
    files = [source.path(i) for source in (train, val) for i in range(len(source))]
    assert sorted(files) == sorted(root.rglob("*.jpg"))
    assert val.path(0).name == "0004.jpg"


def test_images_have_the_models_size(tmp_path: Path) -> None:
    images, labels = opened(write_folder(tmp_path / "set", per_class=5)).read(np.array([0, 7]))
    assert images.shape == (2, 32, 32, 3)
    assert labels.tolist() == [0, 1]
    assert images.std() > 10


def test_folders_of_train_and_val_are_taken(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", per_class=3, classes=("a", "b", "c"))
    write_folder(tmp_path / "validation", per_class=2, classes=("c", "b"))
    val = opened(tmp_path, "val")
    assert len(opened(tmp_path)) == 9
    assert val.classes == ("a", "b", "c")
    assert val.labels.tolist() == [1, 1, 2, 2]


def test_classes_only_in_val_are_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", per_class=1, classes=("a",))
    write_folder(tmp_path / "val", per_class=1, classes=("a", "z"))
    with pytest.raises(DataError, match=r"has classes that .* lacks: z"):
        opened(tmp_path, "val")


def test_nested_and_foreign_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, per_class=1, classes=("a/deep", "b", ".hidden"))
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "b" / "UPPER.JPG").write_bytes(encoded(photo(9, 9)))
    (tmp_path / "b" / "photo.heic").write_text("x")
    (tmp_path / "b" / "._0000.jpg").write_text("macOS's notes on 0000.jpg")
    write_folder(tmp_path / "a", per_class=1, classes=(".thumbnails",))
    for name in ("empty", "__MACOSX/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "__MACOSX" / "b" / "._0000.jpg").write_text("x")
    with caplog.at_level(logging.WARNING):
        listing = list_classes(tmp_path)
    assert listing.classes == ("a", "b")
    assert listing.paths == ("a/deep/0000.jpg", "b/0000.jpg", "b/UPPER.JPG")
    assert listing.labels == (0, 1, 1)
    assert "2 files were left out, because only .jpg" in caplog.text
    assert "1 .txt" in caplog.text
    assert "1 .heic" in caplog.text
    assert "2 folders hold no image and were left out as classes: '__MACOSX', 'empty'." in caplog.text
    caplog.clear()
    list_classes(tmp_path, quiet=True)
    assert not caplog.text


def test_all_formats_make_one_set_and_one_pack(tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    for kind in ("jpg", "png", "webp", "bmp", "gif", "tif", "tiff"):
        photo(40, 40, seed=1).save(tmp_path / "set" / "a" / f"x.{kind}")
    (tmp_path / "set" / "a" / "._x.jpg").write_text("no image")
    images, _ = opened(tmp_path / "set").read(np.arange(5))
    assert images.std() > 10
    packed = pack_source(tmp_path / "set", tmp_path / "pack", Packing(size=32))
    assert packed.manifests[""].count == 7


def test_a_folder_of_nothing_that_is_read_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.heic").write_text("x")
    with pytest.raises(DataError, match=r"No image was found .* 1 file was left out, .*: 1 \.heic\."):
        list_classes(tmp_path)


@pytest.mark.parametrize("make", [lambda root: None, lambda root: (root / "empty").mkdir(parents=True)])
def test_nothing_to_read_is_an_error(tmp_path: Path, make: object) -> None:
    make(tmp_path / "set")  # type: ignore[operator]
    with pytest.raises(DataError, match=r"does not exist|No image was found"):
        opened(tmp_path / "set")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:90]), "cannot be read: its header is cut off"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.unlink(), "it does not exist"),
        (lambda path: Image.new("RGB", (200, 200)).save(path), r"more than data\.max_pixels = 9,999"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, spoil: object, why: str) -> None:
    root = write_folder(tmp_path / "set", per_class=4)
    source = opened(root, max_pixels=9999)
    path = root / "dog" / "0001.jpg"
    spoil(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=why) as caught:
        source.read(np.arange(8))
    assert str(path) in str(caught.value)


def test_skipping_tells_the_path(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", per_class=4)
    (root / "cat" / "0002.jpg").write_bytes(b"\xff\xd8")
    source = opened(root, bad_images="skip")
    reading = source.read_into(np.arange(8), np.empty((8, 32, 32, 3), np.uint8))
    assert [path for path, _ in reading.bad] == [str(root / "cat" / "0002.jpg")]
    assert reading.ids[2] != 2


def test_a_mark_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "set", per_class=2)
    write_folder(tmp_path / "marks", per_class=0)
    monkeypatch.chdir(tmp_path)
    digests = set()
    for level in b"ab":
        Image.new("L", (48, 40), level).save("marks/cat/0000.png")
        os.utime("marks/cat/0000.png", (level, level))
        source = ImageFolder("set", "train", 3, 28, DataConfig())
        source.mark("marks")
        digests.add(source.digest)
    assert len(digests) == 2


SPECIAL = {
    "fifo": (os.mkfifo, "it is a named pipe, not a regular file"),
    "dangling": (lambda path: os.symlink("nowhere", path), "it is a link to nowhere, which does not exist"),
    "zero": (lambda path: os.symlink("/dev/zero", path), "it is a device, not a regular file"),
    "folder": (os.mkdir, "it is a folder, not a regular file"),
    "sparse": (
        lambda path: (path.touch(), os.truncate(path, 3 << 30)),
        "it has 3,221,225,472 bytes, and at most 268,435,456 are read",
    ),
    "unreadable": (lambda path: (path.touch(), path.chmod(0)), "this user may not open it|it is empty"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_cannot_be_opened_is_a_bad_image_like_any_other(kind: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", per_class=60, size=16)
    source, skipping = opened(root), opened(root, bad_images="skip")
    path = root / "cat" / "0002.jpg"
    path.unlink()
    make, why = SPECIAL[kind]
    make(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=f"{re.escape(str(path))} cannot be read: ({why})"):
        source.read(np.arange(8))
    reading = skipping.read_into(np.arange(8), np.empty((8, 32, 32, 3), np.uint8))
    assert [path for path, _ in reading.bad] == [str(path)]
    if kind == "folder":  # packing looks into it
        return
    with pytest.raises(DataError, match=f"{re.escape(str(path))} cannot be used: ({why})"):
        pack_source(root, tmp_path / "pack", Packing(size=16))
    packed = pack_source(root, tmp_path / "pack", Packing(size=16, bad_images="skip"))
    assert packed.manifests[""].skipped == 1


def test_a_folder_that_may_not_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "set", per_class=5)
    scandir = os.scandir

    def deny(path: str) -> object:
        if str(path).endswith("dog"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(PermissionError):
        opened(root)
