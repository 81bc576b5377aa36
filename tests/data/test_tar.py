from __future__ import annotations

import pickle
import tarfile
from pathlib import Path

import pytest

from helpers.images import encoded, smooth, write_tar
from penstock.data.tar import MAX_MEMBER_BYTES, read_tar, shards_of
from penstock.errors import DataError

JPEG = encoded(smooth(20, 20))
PNG = encoded(smooth(20, 20), "PNG")


def test_neighbours_with_one_key_are_a_sample(tmp_path: Path) -> None:
    members = [
        ("a/0001.jpg", JPEG), ("a/0001.cls", b"3\n"), ("a/0001.txt", b"a caption"),
        ("0002.json", b'{"label": 5}'), ("0002.PNG", PNG),
        ("0003.x.y", b""),
    ]  # fmt: skip
    samples = list(read_tar(write_tar(tmp_path / "s.tar", members[:-1])))
    assert [(sample.data, sample.label) for sample in samples] == [(JPEG, 3), (PNG, 5)]
    assert samples[0].path == f"{tmp_path / 's.tar'}:a/0001.jpg"


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ([("k.cls", b"tabby cat")], "tabby cat"),
        ([("k.json", b'{"cls": 2}')], 2),
        ([("k.json", b'{"class": "dog"}')], "dog"),
        ([("k.json", b'{"label": 1}'), ("k.cls", b"7")], 7),
    ],
)
def test_labels_are_numbers_or_names(tmp_path: Path, members: list[tuple[str, bytes]], label: object) -> None:
    (sample,) = read_tar(write_tar(tmp_path / "s.tar", [("k.jpg", JPEG), *members]))
    assert sample.label == label


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_are_streamed(tmp_path: Path, mode: str) -> None:
    plain = write_tar(tmp_path / "s.tar", [("k.jpg", JPEG), ("k.cls", b"1")])
    with tarfile.open(tmp_path / "c.tar", mode) as shard, tarfile.open(plain) as other:  # type: ignore[call-overload]
        for member in other:
            shard.addfile(member, other.extractfile(member))
    assert next(read_tar(tmp_path / "c.tar")).data == JPEG


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil.jpg", "leads out of the shard"),
        ("a/../../evil.jpg", "leads out of the shard"),
        ("/etc/evil.jpg", "leads out of the shard"),
        ("..\\evil.jpg", "leads out of the shard"),
        ("k.pyd", r"only \.jpg, \.jpeg, \.png, \.webp, \.cls, \.txt, \.json members"),
        ("k.pickle", "only"),
        ("k.pth", "only"),
        ("k.jpg.exe", "only"),
        ("k", "only"),
    ],
)
def test_other_members_are_refused(tmp_path: Path, name: str, why: str) -> None:
    shard = write_tar(tmp_path / "s.tar", [(name, JPEG)])
    with pytest.raises(DataError, match=why):
        list(read_tar(shard))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        member = tarfile.TarInfo("k.jpg")
        member.type, member.linkname = kind, "/etc/passwd"
        shard.addfile(member)
    with pytest.raises(DataError, match="link or device"):
        list(read_tar(tmp_path / "s.tar"))


class Exploding:
    def __reduce__(self) -> tuple:
        return (exit, (99,))


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(Exploding())
    for name in ("k.cls", "k.json"):
        shard = write_tar(tmp_path / f"{name}.tar", [("k.jpg", JPEG), (name, bomb)])
        with pytest.raises(DataError, match="class of sample 'k'"):
            list(read_tar(shard))


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([("k.cls", b"1")], "0 images instead of one"),
        ([("k.jpg", JPEG), ("k.png", PNG), ("k.cls", b"1")], "2 images instead of one"),
        ([("k.jpg", JPEG)], "names no class"),
        ([("k.jpg", JPEG), ("k.cls", b"  ")], "names no class"),
        ([("k.jpg", JPEG), ("k.json", b'{"label": true}')], "names no class"),
        ([("k.jpg", JPEG), ("k.json", b'{"label": -1}')], "names no class"),
        ([("k.jpg", JPEG), ("k.json", b"[" * 100_000)], "cannot be read"),
        ([("k.jpg", JPEG), ("k.jpg", JPEG)], r"k\.jpg twice"),
    ],
)
def test_incomplete_samples_are_named(tmp_path: Path, members: list[tuple[str, bytes]], why: str) -> None:
    with pytest.raises(DataError, match=why):
        list(read_tar(write_tar(tmp_path / "s.tar", members)))


def test_huge_members_are_refused_unread(tmp_path: Path) -> None:
    member = tarfile.TarInfo("k.jpg")
    member.size = MAX_MEMBER_BYTES + 1
    (tmp_path / "s.tar").write_bytes(member.tobuf() + bytes(10_240))
    with pytest.raises(DataError, match="more than 256 MB"):
        list(read_tar(tmp_path / "s.tar"))


@pytest.mark.parametrize("length", [100, 700, 1500])
def test_cut_off_shards_are_told(tmp_path: Path, length: int) -> None:
    data = write_tar(tmp_path / "s.tar", [("k.jpg", JPEG), ("k.cls", b"1")]).read_bytes()
    (tmp_path / "s.tar").write_bytes(data[:length])
    with pytest.raises(DataError, match="cannot be read to its end"):
        list(read_tar(tmp_path / "s.tar"))


def test_rubbish_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"rubbish" * 1000)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_tar(tmp_path / "s.tar"))


def test_shards_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar.gz", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [shard.name for shard in shards_of(tmp_path)] == ["a.tar.gz", "b.tar"]
    assert shards_of(tmp_path / "b.tar") == [tmp_path / "b.tar"]
