from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.images import write_folder
from penstock.boundary.manifests import sealed
from penstock.config.run import DataConfig
from penstock.data import Source, open_source
from penstock.data.pack import INDEX, Pack, read_manifest, verify
from penstock.data.packing import Packing, pack_source
from penstock.disk import digest_file
from penstock.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", per_class=10)


def packed(folder: Path, records: str = "raw", **options: object) -> Path:
    target = folder.parent / f"pack-{records}"
    pack_source(folder, target, Packing(size=32, format=records, **options))  # type: ignore[arg-type]
    return target


def opened(path: Path, split: str = "train", channels: int = 3, **config: object) -> Source:
    return open_source(DataConfig(source=f"pack:{path}", **config), split=split, channels=channels)  # type: ignore[arg-type]


def change_manifest(path: Path, change: Callable[[dict], None]) -> None:
    table = json.loads((path / "manifest.json").read_text())
    change(table)
    (path / "manifest.json").write_bytes(sealed(table))


def change_index(path: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the index and make the manifest agree, as an attacker would."""
    index = np.load(path / "index.npy")
    change(index)
    np.save(path / "index.npy", index)
    change_manifest(path, lambda table: table["index"].update(sha256=digest_file(path / "index.npy")))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_pack_reads_like_the_folder(folder: Path, split: str) -> None:
    original = open_source(DataConfig(source=f"imagefolder:{folder}"), split=split, image_size=28)  # type: ignore[arg-type]
    everything = np.arange(len(original))
    images, labels = original.read(everything)
    for records, tolerance in (("raw", 0.0), ("jpeg", 6.0)):
        source = opened(packed(folder, records), split)
        assert (source.size, source.classes) == (32, ("cat", "dog"))
        again, labels_again = source.read(everything)
        np.testing.assert_array_equal(labels_again, labels)
        assert np.abs(again.astype(int) - images).mean() <= tolerance


@pytest.mark.parametrize("records", ["raw", "jpeg"])
def test_grey_is_the_luma(folder: Path, records: str) -> None:
    path = packed(folder, records)
    color, _ = opened(path).read(np.arange(4))
    grey, _ = opened(path, channels=1).read(np.arange(4))
    assert grey.shape == (4, 32, 32, 1)
    luma = color @ np.array([0.299, 0.587, 0.114])
    assert np.abs(grey[..., 0] - luma).mean() < (0.51 if records == "raw" else 3)


def test_a_pack_of_train_and_val(tmp_path: Path) -> None:
    write_folder(tmp_path / "set" / "train", per_class=3, classes=("a", "b", "c"))
    write_folder(tmp_path / "set" / "val", per_class=2, classes=("b", "c"))
    path = packed(tmp_path / "set")
    train, val = opened(path), opened(path, "val")
    assert (len(train), len(val)) == (9, 4)
    assert train.classes == val.classes
    assert val.labels.tolist() == [1, 1, 2, 2]
    change_manifest(path / "val", lambda table: table.update(classes=["c", "b", "a"]))
    with pytest.raises(DataError, match="different classes"):
        opened(path, "val")


def test_packs_can_be_pickled_after_reading(folder: Path) -> None:
    source = opened(packed(folder))
    images, _ = source.read(np.arange(5))
    again, _ = pickle.loads(pickle.dumps(source)).read(np.arange(5))
    np.testing.assert_array_equal(images, again)


def test_verify_counts_every_byte(folder: Path) -> None:
    path = packed(folder)
    assert verify(path) == sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".json")
    shard = path / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[777] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-00000\.bin is not what was written"):
        verify(path)


@pytest.mark.parametrize("records", ["raw", "jpeg"])
def test_a_flipped_bit_is_met_where_it_is(folder: Path, records: str) -> None:
    path = packed(folder, records)
    row = np.load(path / "index.npy")[3]
    shard = path / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[int(row["offset"]) + int(row["length"]) // 2] ^= 4
    shard.write_bytes(data)
    opened(path).read(np.array([0, 1, 2]))
    with pytest.raises(DataError, match=rf"shard-00000\.bin at byte {row['offset']}.*checksum is wrong"):
        opened(path).read(np.array([3]))
    assert opened(path, bad_images="skip").read(np.array([3]))[0].shape == (1, 32, 32, 3)


@pytest.mark.parametrize("file", ["shard-00000.bin", "index.npy"])
@pytest.mark.parametrize("more", [-1, 1])
def test_another_size_is_refused_on_opening(folder: Path, file: str, more: int) -> None:
    path = packed(folder)
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-1] if more < 0 else data + b"\0")
    with pytest.raises(DataError, match=rf"{file} has [\d,]+ bytes, but was written with"):
        opened(path)


def test_a_changed_index_is_refused_on_opening(folder: Path) -> None:
    path = packed(folder)
    data = bytearray((path / "index.npy").read_bytes())
    data[-1] ^= 1
    (path / "index.npy").write_bytes(data)
    with pytest.raises(DataError, match=r"index\.npy is not what was written"):
        opened(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["shard"].__setitem__(0, 1),
        lambda index: index["offset"].__setitem__(0, 1 << 62),
        lambda index: index["offset"].__setitem__(0, 2**64 - 1),
        lambda index: index["offset"].__setitem__(19, index["offset"][19] + 1),
        lambda index: index["length"].__setitem__(0, 2**32 - 1),
        lambda index: index["label"].__setitem__(0, 2),
        lambda index: index["label"].__setitem__(0, -1),
        lambda index: index["length"].__setitem__(0, 5),
    ],
)
def test_an_index_that_lies_is_refused(folder: Path, change: Callable[[np.ndarray], None]) -> None:
    path = packed(folder)
    change_index(path, change)
    with pytest.raises(DataError, match=r"points outside|no image of 32 pixels"):
        opened(path)


def test_a_pickled_index_is_never_loaded(folder: Path) -> None:
    path = packed(folder)
    evil = np.empty(20, object)
    np.save(path / "index.npy", evil, allow_pickle=True)
    size = (path / "index.npy").stat().st_size
    digest = digest_file(path / "index.npy")
    change_manifest(path, lambda table: table["index"].update(sha256=digest, bytes=size))
    with pytest.raises(DataError, match="is no index"):
        opened(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda table: table.update(version=1), "format version 1, but this release reads 2"),
        (lambda table: table.update(layout="other"), "does not describe a packed set"),
        (lambda table: table.update(records="zip"), "records is 'zip', but must be"),
        (lambda table: table.update(size=0), "size is 0, but must be at least 1"),
        (lambda table: table["shards"][0].update(name="../x"), "impossible"),
        (lambda table: table["shards"][0].update(name="shard-00001.bin"), "impossible"),
        (lambda table: table.pop("classes"), r"manifest\.json.*classes"),
        (lambda table: table.update(shards=7), "shards is 7, but must be a list"),
        (lambda table: table.update(count="many"), "count is 'many', but must be a whole number"),
        (lambda table: table.update(count=19), "does not hold the 19 records"),
        (lambda table: table.update(count=math.inf), r"manifest\.json"),
        (lambda table: table.update(count=-20), r"manifest\.json"),
        (lambda table: table["shards"][0].update(bytes=math.inf), r"manifest\.json"),
        (lambda table: table["shards"][0].pop("bytes"), r"manifest\.json"),
        (lambda table: table["index"].update(name="../index.npy"), r"manifest\.json"),
        (lambda table: table.update(index=[1] * 1000), r"manifest\.json"),
        (lambda table: table.update(classes=[[]] * 2), r"manifest\.json"),
        (lambda table: table.update(made_by=[[[]]]), r"manifest\.json"),
    ],
)
def test_a_manifest_that_lies_is_refused(folder: Path, change: Callable[[dict], None], why: str) -> None:
    path = packed(folder)
    change_manifest(path, change)
    for read in (opened, verify):
        with pytest.raises(DataError, match=why):
            read(path)


def test_no_bit_of_a_manifest_can_change(folder: Path) -> None:
    path = packed(folder)
    file = path / "manifest.json"
    whole = file.read_bytes()
    for bit in range(0, len(whole) * 8, 7):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(DataError, match=r"manifest\.json"):
            read_manifest(path)


def test_no_pack_no_reading(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no packed set.*penstock pack"):
        opened(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="is damaged: it is not valid JSON"):
        opened(tmp_path)


def test_the_layout_is_pinned(folder: Path) -> None:
    """Packs are written once and read for years."""
    path = packed(folder)
    assert INDEX.itemsize == 24
    table = json.loads((path / "manifest.json").read_text())
    assert {name: table[name] for name in ("layout", "version", "records", "size", "count", "classes")} == {
        "layout": "penstock-pack", "version": 2, "records": "raw", "size": 32, "count": 20, "classes": ["cat", "dog"],
    }  # fmt: skip
    source = opened(path)
    assert isinstance(source, Pack)
    shard = (path / "shard-00000.bin").read_bytes()
    row = np.load(path / "index.npy")[1]
    image = np.frombuffer(shard, np.uint8, 32 * 32 * 3, int(row["offset"])).reshape(32, 32, 3)
    np.testing.assert_array_equal(source.read(np.array([1]))[0][0], image)
