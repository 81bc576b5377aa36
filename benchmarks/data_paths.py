"""Images per second that one core delivers by each data path, and the cost of augmentation.

    PYTHONPATH=tests python benchmarks/data_paths.py --output benchmarks/results/data_paths_cpu.json

The images are generated, 500 × 375 pixels with the spectrum and file size of photographs (ImageNet's mean is
110 KB), and packed at 256 pixels as JPEG (quality 90) and raw. Each path reads the same number of random
samples on one thread, in rounds A B C, B C A, …; files are in the page cache. Rates are per second of that
thread's processor time, so that other work on the machine does not count; wall-clock rates are listed beside
them. Augmentation turns a batch of 256-pixel images into 224 pixels and floating point, also on one thread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.images import encoded, photo
from penstock.config.run import Augment, DataConfig
from penstock.data import ImageSource, augment_batch, center_batch, decode, open_source
from penstock.data.packing import Packing, pack_source
from ways import Way, in_turn

WIDTH, HEIGHT, QUALITY = 500, 375, 97
BATCH = 64
COPIES = 5
"""Files per image. Generating images takes time, but the set must be larger than the processor's caches."""


def make_folder(root: Path, count: int) -> int:
    """Write the image folder; returns the mean size of a file in bytes."""
    total = 0
    for index in range(count):
        folder = root / f"class{index % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        data = encoded(photo(WIDTH, HEIGHT, seed=index), quality=QUALITY)
        for copy in range(COPIES):
            (folder / f"{index:05d}-{copy}.jpg").write_bytes(data)
        total += len(data)
    return total // count


def reading(source: ImageSource, *, pillow: bool = False) -> Way:
    fast = decode.fast_path

    def work(rng: np.random.Generator) -> int:
        decode.fast_path = (lambda: None) if pillow else fast  # type: ignore[assignment]
        try:
            images, _ = source.read(rng.integers(0, len(source), BATCH))
        finally:
            decode.fast_path = fast
        return len(images)

    return Way(work, "images")


def augmenting(config: Augment | None, batch: int = 8) -> Way:
    images = torch.from_numpy(np.stack([np.asarray(photo(256, 256, seed=seed)) for seed in range(batch)]))
    labels = torch.arange(batch)

    def work(rng: np.random.Generator) -> int:
        if config is None:
            center_batch(images, image_size=224)
        else:
            positions = rng.integers(0, 1 << 40) + np.arange(batch)
            augment_batch(images, labels, config, image_size=224, classes=1000, seed=0, positions=positions)
        return batch

    return Way(work, "images")


def paths(root: Path, count: int) -> tuple[dict[str, Way], dict[str, Any]]:
    """Every path by name, and the facts of the data they read."""
    folder = root / "images"
    facts: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "quality": QUALITY, "images": count * COPIES}
    facts["mean_jpeg_bytes"] = make_folder(folder, count)
    for records in ("jpeg", "raw"):
        packed = pack_source(folder, root / records, Packing(size=256, format=records))  # type: ignore[arg-type]
        facts[f"mean_{records}_record_bytes"] = packed.bytes // (count * COPIES)

    def opened(source: str) -> ImageSource:
        return open_source(DataConfig(source=source), split="train", image_size=224)

    found = {"digits": reading(opened("digits"))}
    found["imagefolder, Pillow"] = reading(opened(f"imagefolder:{folder}"), pillow=True)
    found["pack of JPEG, Pillow"] = reading(opened(f"pack:{root / 'jpeg'}"), pillow=True)
    if decode.fast_path():
        found["imagefolder, simplejpeg + cv2"] = reading(opened(f"imagefolder:{folder}"))
        found["pack of JPEG, simplejpeg"] = reading(opened(f"pack:{root / 'jpeg'}"))
    found["pack of raw"] = reading(opened(f"pack:{root / 'raw'}"))
    found["augment: centre crop"] = augmenting(None)
    found["augment: crop, flip"] = augmenting(Augment())
    found["augment: crop, flip, mixup, cutmix, smoothing"] = augmenting(
        Augment(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    )
    found["augment: all, with colour and erasing"] = augmenting(
        Augment(color=0.5, erase=0.25, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    )
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=300, help="different images; each is stored five times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of processor time, for each path and round"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
        found, facts = paths(Path(root), options.images)
        result = in_turn(found, options.rounds, options.seconds) | {"data": facts}
    if decode.fast_path():
        for package in ("simplejpeg", "opencv-python-headless"):
            result["environment"]["versions"][package] = importlib.metadata.version(package)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
