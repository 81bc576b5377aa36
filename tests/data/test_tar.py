from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from helpers.images import encoded, smooth, write_tar
from penstock.boundary import archives
from penstock.boundary.images import MAX_BYTES
from penstock.data.tar import read_tar, shards_of
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
        (
            "k.pyd",
            r"only \.jpg, \.jpeg, \.png, \.webp, \.bmp, \.gif, \.tif, \.tiff, \.cls, \.txt, \.json members",
        ),
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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tarfile.SYMTYPE, "a link"), (tarfile.LNKTYPE, "a link"), (tarfile.CHRTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"), (tarfile.GNUTYPE_SPARSE, "a file with holes"), (b"?", "of an unknown kind"),
    ],
)  # fmt: skip
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, words: str) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        member = tarfile.TarInfo("k.jpg")
        member.type, member.linkname = kind, "/etc/passwd"
        shard.addfile(member)
    with pytest.raises(DataError, match=f"which is {words}"):
        list(read_tar(tmp_path / "s.tar"))


class Exploding:
    def __reduce__(self) -> tuple:
        return (exit, (99,))


def test_what_macos_adds_is_no_sample(tmp_path: Path) -> None:
    odd = {"._k.jpg": b"x" * 100_000, "k.jpg": JPEG, "._k.cls": b"x", "k.cls": b"1", "a/.DS_Store": b"x"}
    members = list(odd.items())
    assert [sample.label for sample in read_tar(write_tar(tmp_path / "s.tar", members))] == [1]


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
        ([("k.jpg", JPEG), ("k.json", b"[" * 50_000)], "class of sample 'k'"),
        ([("k.jpg", JPEG), ("k.jpg", JPEG)], "'k.jpg' twice"),
    ],
)
def test_incomplete_samples_are_named(tmp_path: Path, members: list[tuple[str, bytes]], why: str) -> None:
    with pytest.raises(DataError, match=why):
        list(read_tar(write_tar(tmp_path / "s.tar", members)))


def test_huge_members_are_refused_unread(tmp_path: Path) -> None:
    member = tarfile.TarInfo("k.jpg")
    member.size = MAX_BYTES + 1
    (tmp_path / "s.tar").write_bytes(member.tobuf() + bytes(10_240))
    with pytest.raises(DataError, match="at most 268,435,456 are read"):
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


def _header(kind: bytes, size: int, name: bytes = b"k.jpg") -> bytes:
    member = tarfile.TarInfo(name.decode())
    member.size = size
    raw = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    raw[156:157] = kind
    raw[148:156] = b"%06o\0 " % (sum(raw) - sum(raw[148:156]) + 8 * 32)
    return bytes(raw)


def _refused(path: Path, content: bytes, why: str) -> None:
    """Within a fraction of a second of processor time and a few megabytes."""
    path.write_bytes(content)
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=why):
            list(read_tar(path))
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 2


def test_a_pax_header_that_is_slow_to_search_is_refused(tmp_path: Path) -> None:
    """tarfile looked for digits and a space from each place on: 10 minutes for a megabyte (CVE-2024-6232)."""
    _refused(tmp_path / "s.tar", _header(b"x", 60_000) + b"1" * 60_416 + bytes(1024), "extended header")
    _refused(tmp_path / "s.tar", _header(b"x", 1 << 20) + b"1" * (1 << 20), "of 1,048,576 bytes")
    _refused(
        tmp_path / "s.tar", _header(b"x", 60_000) + b"5 a=\n" * 12_000 + bytes(416), "more than 200 records"
    )


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_a_long_name_that_expands_to_a_gigabyte_is_refused(tmp_path: Path, kind: bytes) -> None:
    bomb = gzip.compress(_header(kind, 1 << 30) + bytes(8 << 20), 1)
    _refused(tmp_path / "s.tar.gz", bomb, "of 1,073,741,824 bytes, and at most")


@pytest.mark.parametrize("name", ["k.cls", "k.json", "k.txt"])
def test_a_label_that_expands_to_200_megabytes_is_refused(tmp_path: Path, name: str) -> None:
    bomb = gzip.compress(_header(b"0", 200 << 20, name.encode()) + b"1" * (8 << 20), 1)
    _refused(tmp_path / "s.tar.gz", bomb, "of 209,715,200 bytes, and at most 65,536")


@pytest.mark.parametrize("tool", [gzip, bz2, lzma])
def test_an_archive_that_expands_without_end_is_refused(
    tmp_path: Path, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archives._FREE_BYTES < 100_000_000
    monkeypatch.setattr(archives, "_FREE_BYTES", 1 << 20)  # so that the test takes less time
    _refused(
        tmp_path / "s.tar", tool.compress(_header(b"0", 3 << 20) + bytes(3 << 20)), "expand to more than"
    )


def test_headers_without_end_and_parts_without_content_are_refused(tmp_path: Path) -> None:
    folders = _header(b"5", 0, b"a/") * 17_000
    _refused(tmp_path / "s.tar.gz", gzip.compress(folders, 1), "headers and labels without an image")
    _refused(tmp_path / "s.tar.gz", gzip.compress(b"") * 50_000, "hold next to nothing")


def test_files_with_holes_in_every_form_are_refused(tmp_path: Path) -> None:
    record = b"22 GNU.sparse.major=1\n"
    _refused(
        tmp_path / "s.tar",
        _header(b"x", 22) + record.ljust(512, b"\0") + _header(b"0", 0),
        "a file with holes",
    )
    _refused(tmp_path / "s.tar", _header(b"S", 0), "a file with holes")


def test_numbers_of_classes_and_names_of_them_have_a_length(tmp_path: Path) -> None:
    for label, why in ((b"9" * 5000, "up to 200 printable"), (b"a\x1b[2Jb", r"'a\\x1b\[2Jb'")):
        shard = write_tar(tmp_path / "s.tar", [("k.jpg", JPEG), ("k.cls", label)])
        with pytest.raises(DataError, match=why):
            list(read_tar(shard))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_that_tarfile_writes_is_read(tmp_path: Path, form: int) -> None:
    """Long and foreign names, a size of 8 GB in the header's other form, folders, times with fractions."""
    names = ["d" * 90 + "/" + "n" * 60, "kurz"] + (
        [] if form == tarfile.USTAR_FORMAT else ["ü" * 70, "x" * 180]
    )
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as shard:
        for name in names:
            for extension, content in ((".jpg", JPEG), (".cls", b"4")):
                member = tarfile.TarInfo(name + extension)
                member.size, member.mtime = len(content), 1.5 if form == tarfile.PAX_FORMAT else 1
                shard.addfile(member, io.BytesIO(content))
    found = list(read_tar(tmp_path / "s.tar"))
    assert [sample.path.partition(":")[2] for sample in found] == [f"{name}.jpg" for name in names]
    assert all(sample.data == JPEG and sample.label == 4 for sample in found)


def test_zstd_and_special_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    os.mkfifo(tmp_path / "fifo.tar")
    for name, why in (("s.tar", "unzstd"), ("fifo.tar", "named pipe"), ("none.tar", "does not exist")):
        with pytest.raises(DataError, match=why):
            list(read_tar(tmp_path / name))
