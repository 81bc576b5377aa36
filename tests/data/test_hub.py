"""Datasets of the hub, as the datasets library has them: saved to disk, built from a folder, or in no cache."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.config.run import DataConfig
from penstock.data import image_loader, open_source
from penstock.errors import ConfigError, DataError, EnvironmentProblem

datasets = pytest.importorskip("datasets")


def rows(count: int, size: int = 20) -> dict[str, list[Any]]:
    """Grey images whose level is 20 for each class, and their classes: 0, 1, 2, 0, …"""
    return {
        "image": [Image.new("RGB", (size, size), (20 * (i % 3),) * 3) for i in range(count)],
        "label": [i % 3 for i in range(count)],
    }


def features() -> Any:
    return datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog", "owl"]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A dataset with the splits train and validation, as `save_to_disk` writes it."""
    counts = {"train": 30, "validation": 6}
    splits = {name: datasets.Dataset.from_dict(rows(n), features=features()) for name, n in counts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "pets")
    return tmp_path / "pets"


def test_splits_classes_and_pixels(saved: Path) -> None:
    data = DataConfig(source=f"hf:{saved}")
    train, val = (open_source(data, split=split, image_size=14) for split in ("train", "val"))
    assert train.classes == ("cat", "dog", "owl")
    assert (len(train), len(val)) == (30, 6)
    images, labels = val.read(np.arange(6))
    assert images.shape == (6, 16, 16, 3)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images[:, 8, 8, 0].tolist() == [0, 20, 40, 0, 20, 40]


def test_batches_are_made_of_it_and_reading_processes_get_a_copy(saved: Path) -> None:
    source = open_source(DataConfig(source=f"hf:{saved}"), split="train", channels=1, image_size=8)
    with image_loader(source, batch=6, image_size=8, classes=3) as loader:
        batch = next(loader)
    assert batch.images.shape == (6, 1, 8, 8)
    copied = pickle.loads(pickle.dumps(source))
    assert copied.read(np.arange(6))[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_set_without_a_split_for_validation_is_divided(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(rows(30), features=features()).save_to_disk(tmp_path / "one")
    data = DataConfig(source=f"hf:{tmp_path / 'one'}")
    assert [len(open_source(data, split=split)) for split in ("train", "val")] == [24, 6]


def test_a_folder_of_images_in_the_builders_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `load_dataset` does with any dataset of the hub: it builds, and keeps what it built in its cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, count in (("train", 6), ("test", 3)):
        for number, image in enumerate(rows(count)["image"]):
            folder = tmp_path / "set" / split / ("ant", "bee", "fly")[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    source = open_source(DataConfig(source=f"hf:{tmp_path / 'set'}"), split="val", image_size=14)
    assert source.classes == ("ant", "bee", "fly")
    assert len(source) == 3
    assert source.read(np.arange(3))[1].tolist() == [0, 1, 2]


def test_a_broken_image_is_named_by_its_row(tmp_path: Path) -> None:
    made = rows(10)
    raw = io.BytesIO()
    made["image"][0].save(raw, "PNG")
    stored = [{"bytes": raw.getvalue(), "path": None}] * 9 + [{"bytes": raw.getvalue()[:40], "path": None}]
    datasets.Dataset.from_dict({"image": stored, "label": made["label"]}, features=features()).save_to_disk(
        tmp_path / "b"
    )
    source = open_source(DataConfig(source=f"hf:{tmp_path / 'b'}"), split="train", image_size=14)
    with pytest.raises(DataError, match=r"row 9 cannot be read"):
        source.read(np.arange(len(source)))


def test_columns_that_are_not_there_are_said(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).save_to_disk(tmp_path / "text")
    with pytest.raises(
        ConfigError, match=r"has no column of images; its columns are text \(Value\), label \(Value\)"
    ):
        open_source(DataConfig(source=f"hf:{tmp_path / 'text'}"), split="train")


def test_sets_that_cannot_be_used_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = rows(6) | {"label": [0, 1, None, 0, 1, 2]}
    datasets.Dataset.from_dict(made, features=features()).save_to_disk(tmp_path / "unlabelled")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("a,b\n1,2\n1,2,3\n")
    for name, why in (("unlabelled", "rows without a class"), ("csv", r"cannot be read: .*saw 3\.$")):
        with pytest.raises(DataError, match=why):
            open_source(DataConfig(source=f"hf:{tmp_path / name}"), split="train")


REFUSED = """
from penstock.config.run import DataConfig
from penstock.data.open import open_source
from penstock.errors import EnvironmentProblem
try:
    open_source(DataConfig(source="hf:somebody/pets"), split="train")
except EnvironmentProblem as error:
    print(error)
"""


def test_a_name_in_no_cache_is_a_sentence_with_the_remedy(tmp_path: Path) -> None:
    environment, command = (
        os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        [sys.executable, "-c", REFUSED],
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The dataset somebody/pets is not in the cache (")
    assert "load_dataset('somebody/pets')" in done.stdout


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentProblem, match=r"'penstock\[hf\]'"):
        open_source(DataConfig(source="hf:mnist"), split="train")
