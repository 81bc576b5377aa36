from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.images import write_folder
from helpers.sources import Counting
from penstock.config.run import Augment, DataConfig
from penstock.data import Batch, Loader, image_loader, open_source
from penstock.data.packing import Packing, pack_source
from penstock.data.source import BadSample, ImageSource, Pixels
from penstock.data.text.tokenizers import Bytes
from penstock.data.text.tokens import open_tokens
from penstock.errors import ConfigError, DataError

STRONG = Augment(color=0.5, erase=0.3, mixup=0.3, cutmix=1.0, label_smoothing=0.1)


def digits(split: str = "train", channels: int = 1) -> ImageSource:
    return open_source(DataConfig(), split=split, channels=channels)  # type: ignore[arg-type]


def loader(source: ImageSource | None = None, **options: object) -> Loader:
    settings: dict = {"batch": 16, "image_size": 8, "classes": 10, "augment": STRONG, "seed": 3, **options}
    return image_loader(source or digits(), **settings)


def take(batches: Loader, count: int) -> list[Batch]:
    with batches:
        return [next(batches) for _ in range(count)]


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and np.array_equal(a.ids, b.ids)
        for a, b in zip(first, second)
    )


def threads() -> int:
    return sum(thread.name.startswith("penstock-data") for thread in threading.enumerate())


def test_batches_are_what_a_step_takes() -> None:
    for channels, size in ((1, 8), (3, 224)):
        (batch,) = take(loader(digits(channels=channels), image_size=size, augment=Augment()), 1)
        assert batch.images.shape == (16, channels, size, size)
        assert batch.images.dtype == torch.float32
        assert batch.targets.dtype == torch.int64
        assert batch.targets.tolist() == digits().labels[batch.ids].tolist()
        assert len(batch) == 16
    (batch,) = take(loader(), 1)
    assert batch.targets.shape == (16, 10)


def test_an_epoch_loses_and_repeats_nothing() -> None:
    source = digits()
    with loader(batch=100) as batches:
        ids = np.concatenate([next(batches).ids for _ in range(30)])
    for epoch in range(2):
        one = ids[epoch * len(source) : (epoch + 1) * len(source)]
        assert sorted(one.tolist()) == list(range(len(source)))


def test_workers_change_nothing(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", per_class=10)
    source = open_source(DataConfig(source=f"imagefolder:{root}"), split="train", image_size=28)
    settings: dict = {"image_size": 28, "batch": 5, "classes": 2}
    alone = take(loader(source, **settings), 7)
    for workers in (1, 3):
        assert same(take(loader(source, workers=workers, **settings), 7), alone)


def test_more_workers_than_samples() -> None:
    assert same(take(loader(batch=1, workers=3), 4), take(loader(batch=1), 4))


@pytest.mark.parametrize("fields", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_any_form_go_the_same_way(workers: int, fields: bool) -> None:
    source = Counting(50, 6, fields=fields)
    options: dict = {"batch": 8, "seed": 3, "workers": workers}
    with Loader(source, lambda host, device: host, **options) as batches:
        for _ in range(8):  # more than one epoch
            host = next(batches)
            expected = torch.from_numpy(host.ids)[:, None] + torch.arange(6)
            tokens = host.samples["tokens"] if fields else host.samples
            assert tokens.dtype == torch.int32
            assert torch.equal(tokens.long(), expected)
            if fields:
                assert torch.equal(host.samples["mask"], expected % 2 == 0)
    assert host.positions.tolist() == list(range(56, 64))


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_anywhere_is_exact(workers: int) -> None:
    whole = take(loader(batch=100, workers=workers), 20)
    with loader(batch=100) as first:
        for _ in range(13):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] == 1300
    with loader(batch=100, workers=workers) as second:
        next(second)  # reading ahead of where it is sent to
        second.load_state_dict(state)
        assert same([next(second) for _ in range(7)], whole[13:])
        assert second.position == 2000
    assert same(take(loader(batch=100, position=1300), 7), whole[13:])


def test_ranks_share_the_global_batch() -> None:
    config = Augment(color=0.5, erase=0.3)
    alone = take(loader(batch=12, augment=config), 3)
    ranks = [take(loader(batch=4, augment=config, rank=rank, world=3), 3) for rank in range(3)]
    for step, whole in enumerate(alone):
        parts = [ranks[rank][step] for rank in range(3)]
        np.testing.assert_array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
        torch.testing.assert_close(torch.cat([one.images for one in parts]), whole.images, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_is_one_pass_in_order(workers: int) -> None:
    source = digits("val")
    with loader(source, batch=100, augment=None, endless=False, workers=workers) as batches:
        for _ in range(2):
            seen = list(batches)
            assert len(seen) == len(batches) == 4
            assert np.concatenate([batch.ids for batch in seen]).tolist() == list(range(355))
            assert torch.cat([batch.targets for batch in seen]).tolist() == source.labels.tolist()
            assert batches.position == 355


def test_evaluation_over_ranks_sees_each_once() -> None:
    for world in (1, 2, 3, 7):
        ids = []
        for rank in range(world):
            with loader(
                digits("val"), batch=20, augment=None, endless=False, rank=rank, world=world
            ) as batches:
                mine = list(batches)
                assert len(mine) == len(batches)
                ids += [batch.ids for batch in mine]
        assert sorted(np.concatenate(ids).tolist()) == list(range(355))


def test_a_pass_left_early_starts_anew() -> None:
    with loader(digits("val"), batch=50, augment=None, endless=False) as batches:
        assert next(iter(batches)).ids[0] == 0
        assert len(list(batches)) == 8


class Slow(ImageSource):
    """Takes a while for each image."""

    def __init__(self, seconds: float) -> None:
        self.name, self.classes, self.size, self.channels = "slow", ("a",), 8, 1
        self.labels = np.zeros(1000, np.int64)
        self._seconds = seconds

    def load(self, index: int, out: Pixels) -> None:
        time.sleep(self._seconds)
        out[...] = index % 256


def test_waiting_is_counted_and_reading_overlaps_the_step() -> None:
    with loader(Slow(0.005), batch=10, augment=Augment()) as batches:
        next(batches)
        assert batches.wait_seconds > 0.045
        time.sleep(0.3)  # a step: three batches are read meanwhile
        before = batches.wait_seconds
        for _ in range(3):
            next(batches)
        assert batches.wait_seconds - before < 0.045
        before = batches.wait_seconds
        for _ in range(4):
            next(batches)
        assert batches.wait_seconds - before > 0.1


class Broken(Slow):
    def load(self, index: int, out: Pixels) -> None:
        if index % 20 == 0:
            raise BadSample(f"broken/{index}", "it is a test")
        out[...] = 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_ends_the_run_and_keeps_ending_it(workers: int) -> None:
    with loader(Broken(0), batch=50, workers=workers) as batches:
        for _ in range(2):
            with pytest.raises(DataError, match=r"broken/\d+ cannot be read"):
                next(batches)


def test_skipped_images_are_logged_until_there_are_too_many(caplog: pytest.LogCaptureFixture) -> None:
    source = Broken(0)
    source.bad_samples = "skip"
    with loader(source, batch=50) as batches:
        next(batches)
        assert "Skipped the bad sample broken/" in caplog.text
        with pytest.raises(DataError, match="More than 1% of the samples are bad"):
            list(islice(batches, 20))


def test_other_data_cannot_be_resumed() -> None:
    with loader() as batches:
        state = batches.state_dict()
        for change in ({"samples": 7}, {"seed": 4}):
            with pytest.raises(DataError, match=f"{next(iter(change))} {next(iter(change.values()))}"):
                batches.load_state_dict({**state, **change})


def test_bad_settings_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(batch=0, workers=-1, rank=2, world=2)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="10 classes, but the model has only 9"):
        loader(classes=9)


def test_enlarging_is_said_but_not_of_digits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_folder(tmp_path / "set", per_class=5)
    source = open_source(DataConfig(source=f"imagefolder:{root}"), split="train", image_size=28)
    with caplog.at_level(logging.WARNING):
        loader(digits(), image_size=224).close()
        loader(source, image_size=32).close()
        assert not caplog.text
        loader(source, image_size=33).close()
    assert "stores images of 32 pixels, fewer than the 33" in caplog.text


def test_threads_end_with_the_loader() -> None:
    before = threads()
    closed, dropped = loader(), loader()
    next(closed), next(dropped)
    assert threads() == before + 2
    closed.close()
    closed.close()
    with pytest.raises(StopIteration):
        next(closed)
    assert threads() == before + 1
    del dropped
    gc.collect()
    assert threads() == before


def test_a_closed_loader_cannot_start_again() -> None:
    batches = loader(digits("val"), endless=False)
    batches.close()
    with pytest.raises(RuntimeError, match="closed"):
        iter(batches)


@pytest.mark.gpu
def test_on_a_gpu_batches_are_the_same_and_nothing_waits() -> None:
    config = Augment(crop_scale_min=0.3, erase=0.3, mixup=0.3)
    on_cpu = take(loader(image_size=32, augment=config), 5)
    with loader(image_size=32, augment=config, device="cuda") as batches:
        on_gpu = [next(batches) for _ in range(5)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for first, second in zip(on_cpu, on_gpu):
        np.testing.assert_array_equal(first.ids, second.ids)
        torch.testing.assert_close(second.targets.cpu(), first.targets)
        torch.testing.assert_close(second.images.cpu(), first.images, rtol=0, atol=1.7 / 127.5)


def test_the_first_batch_says_how_bright_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name, level in (("lit", 51), ("black", 0)):
        for folder in ("a", "b"):
            (tmp_path / name / folder).mkdir(parents=True)
            for number in range(5):
                pixels = np.full((8, 8, 3), level * (1 + (folder == "b")), np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / folder / f"{number}.png")
        source = open_source(DataConfig(source=f"imagefolder:{tmp_path}/{name}"), split="train", image_size=8)
        with image_loader(source, batch=8, image_size=8, classes=2) as loader:
            next(loader)
            next(loader)
    means = [record for record in caplog.records if "first batch has a mean" in record.message]
    assert [record.args[1:] for record in means] == [
        (pytest.approx(0.3, abs=1e-3), pytest.approx(0.1, abs=1e-2)),
        (0, 0),
    ]
    assert caplog.text.count("are the same even grey of 0.000. Check the files, and data.range") == 1


@pytest.mark.parametrize("change", ["nothing", "replace", "rename", "touch"])
def test_a_position_belongs_to_the_files_that_it_was_saved_with(change: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", per_class=5)

    def loader() -> Any:
        data = DataConfig(source=f"imagefolder:{root}")
        return image_loader(open_source(data, split="train", image_size=8), batch=2, image_size=8, classes=2)

    with loader() as first:
        next(first)
        state = first.state_dict()
    file = root / "cat" / "0001.jpg"
    if change == "replace":
        file.write_bytes((root / "dog" / "0001.jpg").read_bytes())
    elif change == "rename":
        file.rename(root / "cat" / "0001b.jpg")
    elif change == "touch":
        os.utime(file, (1, 1))
    with loader() as again:
        if change == "nothing":
            again.load_state_dict(state)
            again.load_state_dict({key: value for key, value in state.items() if key != "digest"})
            return
        with pytest.raises(
            DataError, match=r"changed since the position was saved: a file was replaced, renamed"
        ):
            again.load_state_dict(state)


def test_a_position_belongs_to_the_text_and_to_the_pack(tmp_path: Path) -> None:
    digests = []
    for word in ("one", "two", "one"):
        (tmp_path / "a.txt").write_text(f"{word} and more\n" * 50)
        digests.append(
            open_tokens(DataConfig(source=f"text:{tmp_path}/a.txt"), Bytes(), "train", length=8).digest
        )
    assert digests[0] == digests[2] != digests[1]
    packs = []
    for number in range(2):
        pack_source(
            write_folder(tmp_path / f"set{number}", per_class=5 + 5 * number),
            tmp_path / f"p{number}",
            Packing(size=8),
        )
        packs.append(open_source(DataConfig(source=f"pack:{tmp_path}/p{number}"), split="train").digest)
    assert packs[0]
    assert packs[0] != packs[1]
