"""Making a packed set from an image folder or tar shards. It streams, so that memory does not grow with the set."""

from __future__ import annotations

import io
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image

from penstock import __version__
from penstock.boundary.files import Unreadable, content, shown
from penstock.boundary.images import MAX_BYTES, check_image
from penstock.config.convert import Checked, Count, Positive, Range
from penstock.data.decode import backend, decode, fast_path
from penstock.data.imagefolder import Listing, list_classes, list_split
from penstock.data.pack import INDEX, INDEX_FILE, MANIFEST, File, ImageManifest, Records, new_pack, write_part
from penstock.data.source import BadSample, LeftOut, Pixels
from penstock.data.splits import split_files, split_folders
from penstock.data.tar import Sample, read_tar, shards_of
from penstock.disk import sync_folder
from penstock.errors import DataError

SHARD_BYTES = 1 << 30
IN_FLIGHT_BYTES = 1 << 30
"""Most bytes that all threads together hold; a single image may take more (see `data.max_pixels`)."""

Progress = Callable[[int], None]
"""Called with the number of images done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Checked):
    """How a set is packed. Fields are options of `penstock pack`; each docstring is one line, as `--help` shows it."""

    size: Annotated[int, Range(1, 1 << 14)] = 256
    """Side in pixels of the stored images: the shorter side is resized, the centre kept. 256 suits models of 224."""
    format: Records = "jpeg"
    """`jpeg` takes about 20 KB for an image of 256 pixels. `raw` takes 192 KB, and reads several times faster."""
    quality: Annotated[int, Range(1, 100)] = 90
    """JPEG quality, 1 to 100."""
    bad_images: Literal["fail", "skip"] = "fail"
    """`fail` stops at an image that cannot be read. `skip` leaves it out and logs its path, up to 1 % of the set."""
    max_pixels: Count = 100_000_000
    """An image whose header claims more pixels is bad, and is not decoded."""
    range: Positive | None = None
    """Value of white in images of more than 8 bits: 4095 for 12 bits, 65535 for 16. None: as each file says."""
    threads: Annotated[int, Range(0, 4096)] = 0
    """Decoding threads; 0 takes one per core."""


class Packed(NamedTuple):
    """A pack that was written: a manifest for each folder ('' for a set without a split)."""

    manifests: dict[str, ImageManifest]
    bytes: int


def pack_source(
    source: str | os.PathLike[str], target: str | os.PathLike[str], packing: Packing | None = None, *,
    progress: Progress | None = None,
) -> Packed:  # fmt: skip
    """Pack `source` into the new folder `target`.

    `source` is a folder of class folders, a tar shard, a folder of shards, or a folder with `train` and `val` of
    either. `progress` is called with the number of images done. Raises DataError for bad images as the policy says,
    for more than 1 % of them, and where `target` exists. The pack gets its name only when it is complete.
    """
    packing = packing or Packing()
    streams, manifests = _streams(Path(source)), dict[str, ImageManifest]()
    with new_pack(Path(target)) as part:
        classes: tuple[str, ...] | None = None
        for split, (classes_of_split, samples) in streams.items():
            manifests[split] = _write(part / split, packing, classes_of_split or classes, samples, progress)
            classes = manifests[split].classes
    return Packed(manifests, sum(file.bytes for manifest in manifests.values() for file in manifest.files))


SampleOrBad = Sample | BadSample
_Streams = dict[str, tuple[tuple[str, ...] | None, Iterator[SampleOrBad]]]


def _streams(source: Path) -> _Streams:
    """The classes of each split, if they are known beforehand, and its samples. Train comes first."""
    if not source.exists():
        raise DataError(f"{source} does not exist, so there is nothing to pack.")
    if tars := shards_of(source):
        parts = split_files(tars, str(source))
        shards = dict(zip(("train", "val") if len(parts) == 2 else ("",), parts))
    else:
        train, val = split_folders(source)
        folders = {"": train} if val is None else {"train": train, "val": val}
        shards = {split: shards_of(folder) for split, folder in folders.items()}
    if all(shards.values()):
        return {split: (None, chain.from_iterable(map(read_tar, files))) for split, files in shards.items()}
    if val is None:
        listings = {"": list_classes(train)}
    else:
        listings = {"train": list_split(source, "train"), "val": list_split(source, "val")}
    return {split: (listing.classes, _from_folder(listing)) for split, listing in listings.items()}


def _from_folder(listing: Listing) -> Iterator[SampleOrBad]:
    for path, label in zip(listing.paths, listing.labels):
        file = listing.root / path
        try:
            yield Sample(content(file, limit=MAX_BYTES), label, shown(file))
        except Unreadable as error:
            yield BadSample(shown(file), str(error))


def _encode(image: Pixels, quality: int) -> bytes:
    """A JPEG with chroma at half resolution, which decodes 1.5 times as fast as full resolution."""
    fast = fast_path()
    if fast is not None:
        encoded: bytes = fast[0].encode_jpeg(image, quality=quality, colorspace="RGB", colorsubsampling="420")
        return encoded
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def _convert(sample: SampleOrBad, packing: Packing) -> SampleOrBad:
    """Decode, resize and encode a sample, or say why not. Runs in a thread: the decoders release the GIL."""
    if isinstance(sample, BadSample):
        return sample
    image = np.empty((packing.size, packing.size, 3), np.uint8)
    try:
        decode(sample.data, image, max_pixels=packing.max_pixels, white=packing.range)
    except Unreadable as error:
        return BadSample(sample.path, str(error))
    record = image.tobytes() if packing.format == "raw" else _encode(image, packing.quality)
    return sample._replace(data=record)


def _write(
    root: Path, packing: Packing, classes: tuple[str, ...] | None, samples: Iterator[SampleOrBad],
    progress: Progress | None,
) -> ImageManifest:  # fmt: skip
    """Write one folder of a pack: shards, then the index, then the manifest."""
    rows: list[tuple[int, int, int, int, int | str]] = []
    """Offset, length, CRC-32, shard and label of each image."""
    shards: list[File] = []
    left_out = LeftOut(packing.bad_images, "images", "--bad-images skip")

    def accepted() -> Iterator[Sample]:
        """The images that can be packed, in order; the policy decides about bad ones."""
        for done, result in enumerate(_in_threads(samples, packing), start=1):
            if progress is not None:
                progress(done)
            if isinstance(result, Sample):
                yield result
            else:
                left_out.add(result.path, result.why, len(rows))
        left_out.close(len(rows))

    def shard(records: Iterator[Sample]) -> Iterator[bytes]:
        """The content of the next shard."""
        offset = 0
        for item in records:
            rows.append((offset, len(item.data), zlib.crc32(item.data), len(shards), item.label))
            yield item.data
            offset += len(item.data)
            if offset >= SHARD_BYTES:
                return

    root.mkdir(parents=True, exist_ok=True)
    records = accepted()
    for first in records:
        content = shard(chain([first], records))
        shards.append(write_part(root, f"shard-{len(shards):05d}.bin", content))
    if not rows:
        raise DataError("There is no image to pack. Check the source.")
    classes, numbers = _number([label for *_, label in rows], classes)
    index = np.array([(*row, number) for (*row, _), number in zip(rows, numbers)], INDEX)
    encoded = io.BytesIO()
    np.save(encoded, index, allow_pickle=False)
    settings = {name: getattr(packing, name) for name in ("quality", "bad_images", "max_pixels")}
    settings |= {} if packing.range is None else {"range": f"{packing.range:g}"}
    manifest = ImageManifest(
        records=packing.format, size=packing.size, count=len(rows), classes=classes,
        index=write_part(root, INDEX_FILE, [encoded.getbuffer()]), shards=tuple(shards), skipped=left_out.count,
        made_by={"penstock": __version__, "decoder": backend(), **settings},
    )  # fmt: skip
    write_part(root, MANIFEST, [manifest.to_json()])
    sync_folder(root)
    return manifest


def _in_threads(samples: Iterator[SampleOrBad], packing: Packing) -> Iterator[SampleOrBad]:
    """Convert in threads, in order, with a bounded number and a bounded size in flight."""
    threads = packing.threads or os.cpu_count() or 1
    in_flight: deque[tuple[int, Future[SampleOrBad]]] = deque()
    held_bytes = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-pack") as pool:
        try:
            for sample in samples:
                size = _size(sample, packing)
                while in_flight and (held_bytes + size > IN_FLIGHT_BYTES or len(in_flight) >= 4 * threads):
                    done, future = in_flight.popleft()
                    yield future.result()
                    held_bytes -= done
                in_flight.append((size, pool.submit(_convert, sample, packing)))
                held_bytes += size
            while in_flight:
                yield in_flight.popleft()[1].result()
        finally:
            for _, future in in_flight:
                future.cancel()


def _size(sample: SampleOrBad, packing: Packing) -> int:
    """Bytes that converting a sample takes: the file, its pixels, and the result before it is encoded."""
    if isinstance(sample, BadSample):
        return 0
    with suppress(Unreadable):
        pixels = check_image(sample.data, packing.max_pixels).pixels
        return len(sample.data) + 3 * (pixels + packing.size**2)
    return len(sample.data)  # it will not be decoded


def _number(labels: list[int | str], classes: tuple[str, ...] | None) -> tuple[tuple[str, ...], list[int]]:
    """Class names, and the number of each label. Numbers stay as they are; names are numbered in sorted order."""
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels):
        if max(numbers) >= 1 << 20:
            raise DataError(
                f"A sample has class number {max(numbers)}; class numbers must be below 1,048,576."
            )
        names = classes or tuple(map(str, range(max(numbers) + 1)))
        if max(numbers) >= len(names):
            raise DataError(
                f"The val set has class {max(numbers)}, but the train set only {len(names)} classes from 0 on."
            )
        return names, numbers
    if numbers:
        raise DataError("Some samples name their class and others number it. Use one of the two throughout.")
    words = [label for label in labels if isinstance(label, str)]
    names = classes or tuple(sorted(set(words)))
    number = {name: index for index, name in enumerate(names)}
    unknown = sorted(set(words) - set(names))
    if unknown:
        raise DataError(f"The val set has classes that the train set lacks: {', '.join(unknown[:5])}.")
    return names, [number[word] for word in words]
