"""Names of splits: one table for folders of images, packs, texts and sets of the hub."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from helpers.images import encoded, photo, write_folder, write_tar
from penstock.config.run import DataConfig
from penstock.data import open_source
from penstock.data.imagefolder import list_split
from penstock.data.packing import Packing, pack_source
from penstock.data.splits import divided, hub_splits, split_files, split_in
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Bytes
from penstock.errors import DataError

TRAINS, VALS = ("train", "Training"), ("val", "valid", "VALIDATION", "dev", "test", "testing")


@pytest.mark.parametrize("train", TRAINS)
@pytest.mark.parametrize("val", VALS)
def test_images_packs_texts_and_the_hub_know_the_same_names(train: str, val: str, tmp_path: Path) -> None:
    for name, count in ((train, 3), (val, 2)):
        write_folder(tmp_path / "set" / name, per_class=count, size=8)
    assert [len(list_split(tmp_path / "set", split).paths) for split in ("train", "val")] == [6, 4]
    pack_source(tmp_path / "set", tmp_path / "pack", Packing(size=8))
    for old, new in (("train", train), ("val", val)):
        (tmp_path / "pack" / old).rename(tmp_path / "pack" / new)
    data = DataConfig(source=f"pack:{tmp_path}/pack")
    assert [len(open_source(data, split=split)) for split in ("train", "val")] == [6, 4]
    files = [tmp_path / f"{name}.csv" for name in (val, train)]
    assert split_files(files, str(tmp_path)) == [files[1:], files[:1]]
    assert hub_splits([val, train], "set") == (train, [val])


def test_the_best_name_is_taken_and_the_others_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert divided(["test", "dev", "train"]) == {"train": ["train"], "val": ["dev"]}
    mnli = ["train", "test_matched", "test_mismatched", "validation_matched", "validation_mismatched"]
    assert hub_splits(mnli, "mnli") == ("train", ["validation_matched", "validation_mismatched"])
    assert "not used: 'test_matched, test_mismatched'" in caplog.text
    assert hub_splits(["validation"], "set") == ("validation", [])
    assert hub_splits(["validation", "test"], "set") == ("validation", [])
    assert hub_splits(["all", "test"], "set") == ("all", ["test"])
    assert hub_splits(["train_gen", "train_sft", "test_sft"], "set") == ("train_gen", ["test_sft"])
    assert split_in("train/test-notes.txt") == ("train", 0)
    assert split_in("train_test.csv") is None
    files = [Path(name) for name in ("test", "train", "train-2", "valid")]
    assert split_files(files, "set/*") == [files[1:3], files[3:]]
    for name in ("train", "valid", "test"):
        write_folder(tmp_path / name, per_class=1, size=8)
    with caplog.at_level(logging.WARNING):
        assert list_split(tmp_path, "train").root.name == "train"
        assert list_split(tmp_path, "val").root.name == "valid"
    assert caplog.text.count("folders that are not used: 'test'") == 1


@pytest.mark.parametrize(
    ("folders", "problem"),
    [
        (
            ("cat", "dog", "test"),
            "holds 'test', the name of a split, which has no train beside it. Put the folders",
        ),
        (("cat", "dog", "train"), "holds 'train', the name of a split, which holds no folders. Put"),
        (("train/cat", "train/dog", "test"), "holds images and no folders of classes.*; or move it out of"),
        (("valid/cat", "valid/dog"), "'valid', the name of a split, which has no train"),
        (("train/cat", "val/cat", "valid/cat"), "holds val and valid, which all mean the same split"),
        (("cat/train", "cat/val", "dog/train", "dog/val"), "hold the same folders: 'train, val'"),
        (
            ("here/cat", "here/dog", "there/cat", "there/dog"),
            "hold the same folders: 'cat, dog'.*merge those",
        ),
        (("train/here/a", "train/here/b", "train/there/a", "train/there/b"), "hold the same folders: 'a, b'"),
    ],
)
def test_folders_that_would_be_read_otherwise_than_meant_are_refused(
    folders: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    for folder in folders:
        write_folder(tmp_path, per_class=1, size=8, classes=(folder,))
    with pytest.raises(DataError, match=problem):
        list_split(tmp_path, "train")


@pytest.mark.parametrize(
    "folders", [("cat/images", "dog/images"), ("cat/old", "cat/new", "dog"), ("cat/2019", "dog/2020")]
)
def test_classes_may_have_folders_of_their_own(folders: tuple[str, ...], tmp_path: Path) -> None:
    for folder in folders:
        write_folder(tmp_path, per_class=3, size=8, classes=(folder,))
    assert list_split(tmp_path, "train").classes == ("cat", "dog")


def test_shards_are_divided_by_their_names(tmp_path: Path) -> None:
    image = encoded(photo(8, 8))
    for name, count in (("set-train-0", 3), ("set-train-1", 3), ("set-val-0", 2)):
        files = [part for n in range(count) for part in ((f"{n}.jpg", image), (f"{n}.cls", b"0"))]
        write_tar(tmp_path / f"{name}.tar", files)
    packed = pack_source(tmp_path, tmp_path / "pack", Packing(size=8))
    assert {name: manifest.count for name, manifest in packed.manifests.items()} == {"train": 6, "val": 2}


def test_both_validation_sets_of_mnli_are_evaluated(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def made(word: str, count: int) -> object:
        premises, labels = [f"{word} {n}" for n in range(count)], [n % 2 for n in range(count)]
        text, label = datasets.Value("string"), datasets.ClassLabel(names=["none", "-"])
        features = datasets.Features(premise=text, hypothesis=text, label=label)
        rows = {"premise": premises, "hypothesis": ["h"] * count, "label": labels}
        return datasets.Dataset.from_dict(rows, features=features)

    splits = {"train": ("t", 6), "validation_mismatched": ("x", 2), "validation_matched": ("m", 3)}
    made_splits = {name: made(*parts) for name, parts in splits.items()}
    datasets.DatasetDict(made_splits).save_to_disk(tmp_path / "mnli")
    source = open_rows(DataConfig(source=f"hf:{tmp_path}/mnli"), Bytes(), "val", form="pair", length=20)
    rows = np.zeros(len(source), source.sample)
    source.read_into(np.arange(len(source)), rows)
    starts = sorted(Bytes().decode(row.tolist())[:3] for row in rows["tokens"])
    assert starts == ["m 0", "m 1", "m 2", "x 0", "x 1"]
    assert source.classes == ("-", "none")
