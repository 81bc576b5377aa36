"""Packed sets: resized images in a few large files, read by memory map. Format version 2.

    manifest.json     the format version, records (raw or jpeg), size, classes, SHA-256 and bytes of all files, its seal
    index.npy         one row per record (INDEX): where it is, its CRC-32 and its class
    shard-00000.bin   records one after the other: size × size × 3 bytes of RGB each, or one JPEG each

Or a folder with two of them, `train` and `val`. File sizes and the index are checked whenever a pack is opened, a
record's CRC-32 when a process first reads it, and the SHA-256 of the shards by `verify`. Nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.boundary import manifests
from penstock.boundary.files import Unreadable, naming, open_regular, read_bytes, shown
from penstock.boundary.manifests import sealed
from penstock.config.convert import Natural, Range
from penstock.config.load import from_dict
from penstock.config.run import DataConfig
from penstock.data.decode import decode
from penstock.data.source import BadSample, ImageSource, Pixels, Split, is_val
from penstock.data.splits import split_folders
from penstock.disk import digest_file, sync_folder, write_file
from penstock.errors import DataError
from penstock.leftovers import make_public, temporary

Records = Literal["raw", "jpeg"]

KIND = "penstock-pack"
VERSION = 2
MANIFEST = "manifest.json"
INDEX_FILE = "index.npy"
INDEX = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4"), ("shard", "<u4"), ("label", "<i4")])
_COLUMNS = re.escape(f"{{'descr': {INDEX.descr}, 'fortran_order': False, 'shape': (").encode()
_INDEX_HEAD = re.compile(rb"\x93NUMPY\x01\x00.." + _COLUMNS + rb"([1-9][0-9]{0,9}),\), \} *\n", re.DOTALL)
"""How NumPy begins a file of such rows; the group is their number. Nothing of it is evaluated."""
LUMA = np.array([299, 587, 114], np.uint32)
AGAIN = "Pack the set again."
COPY = "It is cut off or was changed; copy the pack again, or pack the set again."


@dataclass(frozen=True, slots=True)
class File:
    """One file of a pack, as listed in the manifest."""

    name: str
    bytes: Annotated[int, Range(0, 1 << 60)]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    """The content of `manifest.json`."""

    records: Records
    size: Annotated[int, Range(1, 1 << 14)]
    count: Natural
    classes: tuple[str, ...]
    index: File
    shards: tuple[File, ...]
    skipped: Natural
    """Bad images that were left out when the pack was made."""
    made_by: dict[str, str | int]
    """Version and settings of the packer, for information."""

    @property
    def files(self) -> tuple[File, ...]:
        return (self.index, *self.shards)

    def to_json(self) -> bytes:
        return sealed({"layout": KIND, "version": VERSION, **asdict(self)})


def read_table(root: Path, layout: str, version: int, title: str) -> dict[str, Any]:
    """The table in a pack's manifest; `title` names it in messages. Raises DataError where it is missing, broken, or of
    another kind or version."""
    path = root / MANIFEST
    where = shown(path)
    if not path.is_file():
        raise DataError(f"{shown(root)} is no {title}: {where} is missing. Make one with `penstock pack`.")
    table, has_seal = manifests.read_manifest(path, where, error=DataError, remedy=AGAIN)
    if table.pop("layout", None) != layout:
        raise DataError(f"{where} does not describe a {title}. Make one with `penstock pack`.")
    written = table.pop("version", None)
    if written != version or not has_seal:
        raise DataError(
            f"{where} has format version {shown(str(written))}, but this release reads {version}, with a seal. {AGAIN}"
        )
    return table


def check_sizes(root: Path, files: Iterable[File]) -> None:
    """Raise DataError for a file whose size is not as written."""
    for file in files:
        with open_regular(root / file.name, "The pack file", remedy=COPY) as opened:
            size = os.fstat(opened.fileno()).st_size
        if size != file.bytes:
            raise DataError(
                f"The pack file {shown(root / file.name)} has {size:,} bytes, but was written with {file.bytes:,}. "
                f"{COPY}"
            )


def check_sum(root: Path, file: File) -> None:
    """Raise DataError for a file whose content is not as written."""
    if digest_file(root / file.name) != file.sha256:
        raise DataError(
            f"The pack file {shown(root / file.name)} is not what was written: its SHA-256 differs. {COPY}"
        )


def map_file(path: Path) -> memoryview:
    """The content of a pack's file, by memory map."""
    with open_regular(path, "The pack file") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_part(root: Path, name: str, chunks: Iterable[bytes | memoryview]) -> File:
    """Write a file of a pack; returns its entry in the manifest."""
    file = write_file(root / name, chunks)
    return File(name, file.bytes, file.sha256)


@contextmanager
def new_pack(target: Path) -> Iterator[Path]:
    """A folder to write a pack into, which becomes `target` once it is complete. Raises DataError where that exists."""
    if target.exists():
        raise DataError(f"{target} exists already. Remove it, or choose another name for the pack.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary(target.parent, f".{target.name[:40]}.part-") as part, naming(part):
        yield part
        make_public(part)
        part.rename(target)
        sync_folder(target.parent)


def read_manifest(root: Path) -> ImageManifest:
    """The manifest of an image pack. Raises DataError as `read_table` does, and if it contradicts itself."""
    path, table = root / MANIFEST, read_table(root, KIND, VERSION, "packed set")
    manifest = from_dict(ImageManifest, table, origin=f"{path}, which must be packed again", error=DataError)
    names = [file.name for file in manifest.files]
    if not manifest.shards or names != [
        INDEX_FILE,
        *(f"shard-{n:05d}.bin" for n in range(len(manifest.shards))),
    ]:
        raise DataError(f"{path} is broken: it names impossible files. Pack the set again.")
    return manifest


def _read_index(root: Path, manifest: ImageManifest) -> NDArray[np.void]:
    check_sum(root, manifest.index)
    path = root / manifest.index.name
    raw = read_bytes(path, "The index", limit=manifest.index.bytes, remedy="Copy the pack again.")
    head = _INDEX_HEAD.match(raw)
    if head is None:
        raise DataError(f"{path} is no index: it does not begin like one. Pack the set again.")
    if int(head[1]) != manifest.count or len(raw) - head.end() != manifest.count * INDEX.itemsize:
        raise DataError(
            f"{path} does not hold the {manifest.count:,} records of its manifest. Pack the set again."
        )
    index = np.frombuffer(raw, INDEX, offset=head.end())
    sizes = np.array([shard.bytes for shard in manifest.shards], np.uint64)
    shard = index["shard"]
    known = shard < len(sizes)
    inside = known & (index["length"] > 0) & (index["offset"] <= sizes[np.where(known, shard, 0)])
    inside &= index["length"] <= sizes[np.where(known, shard, 0)] - np.where(inside, index["offset"], 0)
    label = index["label"]
    if not inside.all() or label.min() < 0 or label.max() >= len(manifest.classes):
        raise DataError(f"{path} points outside its shards or classes. Pack the set again.")
    if manifest.records == "raw" and (index["length"] != manifest.size**2 * 3).any():
        raise DataError(
            f"{path} has records that are no image of {manifest.size} pixels. Pack the set again."
        )
    return index


def splits(path: str | os.PathLike[str]) -> dict[str, Path]:
    """The folders of a packed set: `train` and `val`, by any usual names; or '' for one folder of everything."""
    root = Path(path)
    if (root / MANIFEST).is_file() or not root.is_dir():
        return {"": root}
    train, val = split_folders(root, quiet=True)
    return {"": root} if val is None else {"train": train, "val": val}


def verify(path: str | os.PathLike[str]) -> int:
    """Check every byte of a pack against its manifest. Returns the bytes checked; raises DataError."""
    total, classes = 0, set()
    for root in splits(path).values():
        manifest = read_manifest(root)
        classes.add(manifest.classes)
        check_sizes(root, manifest.files)
        _read_index(root, manifest)
        for shard in manifest.shards:
            check_sum(root, shard)
        total += sum(file.bytes for file in manifest.files)
    if len(classes) > 1:
        raise _classes_differ(path)
    return total


def _classes_differ(path: str | os.PathLike[str]) -> DataError:
    return DataError(f"The train and val sets of {path} have different classes. Pack them together again.")


class Pack(ImageSource):
    """Reads a packed set. Without folders `train` and `val`, every fifth image of a class is in the validation set."""

    def __init__(self, path: str, split: Split, channels: int, image_size: int, config: DataConfig) -> None:
        folders = splits(path)
        self._root = folders.get(split) or folders[""]
        self.manifest = read_manifest(self._root)
        check_sizes(self._root, self.manifest.files)
        index = _read_index(self._root, self.manifest)
        if "" in folders:
            index = index[is_val(index["label"]) == (split == "val")]
        elif self.manifest.classes != read_manifest(folders["train"]).classes:
            raise _classes_differ(path)
        self.name = f"pack:{path} ({split})"
        self.classes = self.manifest.classes
        self.labels = index["label"].astype(np.int64)
        self.size, self.channels = self.manifest.size, channels
        self.bad_samples = config.bad_images
        self.digest = "".join(file.sha256[:16] for file in self.manifest.files)
        white = self.manifest.made_by.get("range")
        self.white = None if white is None else float(white)
        self._index = index
        self._checked = np.zeros(len(index), bool)
        self._maps: dict[int, memoryview] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def _record(self, index: int) -> memoryview:
        row = self._index[index]
        shard, offset = int(row["shard"]), int(row["offset"])
        if shard not in self._maps:
            self._maps[shard] = map_file(self._root / self.manifest.shards[shard].name)
        record = self._maps[shard][offset : offset + int(row["length"])]
        if not self._checked[index]:
            if zlib.crc32(record) != int(row["crc"]):
                raise BadSample(
                    self._where(index), "its checksum is wrong, so it changed since it was packed"
                )
            self._checked[index] = True
        return record

    def _where(self, index: int) -> str:
        row = self._index[index]
        name = self.manifest.shards[int(row["shard"])].name
        return f"{self._root / name} at byte {int(row['offset'])}"

    def load(self, index: int, out: Pixels) -> None:
        record = self._record(index)
        if self.manifest.records == "jpeg":
            try:
                decode(bytes(record), out, max_pixels=self.size**2)
            except Unreadable as error:
                raise BadSample(self._where(index), str(error)) from error
            return
        image = np.frombuffer(record, np.uint8).reshape(self.size, self.size, 3)
        if self.channels == 3:
            out[...] = image
        else:
            out[..., 0] = (image @ LUMA + 500) // 1000
