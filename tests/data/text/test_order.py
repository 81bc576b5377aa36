"""Text through a Loader: the same samples for any number of ranks and workers, and after a resume in the middle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.config.run import DataConfig
from penstock.data import Loader, Source
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Bytes
from penstock.data.text.tokens import open_tokens
from penstock.errors import DataError


def tokens(root: Path) -> Source:
    (root / "a.txt").write_text("".join(f"{number} is a number.\n" for number in range(500)))
    return open_tokens(DataConfig(source=f"text:{root}/a.txt"), Bytes(), "train", length=16)


def rows(root: Path) -> Source:
    lines = [f"{'x' * (n % 37 + 1)}\t{'y' * (n % 11 + 1)}" for n in range(600)]
    (root / "b.tsv").write_text("first\tsecond\n" + "\n".join(lines))
    data = DataConfig(source=f"pairs:{root}/b.tsv", group_by_length=True)
    return open_rows(data, Bytes(), "train", form="two", length=64)


def take(source: Source, count: int, *, position: int = 0, group: int = 12, **options: object) -> np.ndarray:
    """(count, batch) ids of what a Loader gives; each sample is looked at too."""
    settings: dict = {"batch": 12, "seed": 5, **options}
    with Loader(source, lambda host, _: host, group=group, **settings) as loader:
        if position:
            state = {**loader.state_dict(), "position": position}
            loader.load_state_dict(state)
        found = [next(loader) for _ in range(count)]
    for host in found:
        expected = np.empty(len(host.ids), source.sample)
        source.read_into(host.ids, expected)
        name = source.sample.names and source.sample.names[0]
        given = host.samples[name] if name else host.samples
        assert torch.equal(given, torch.from_numpy(expected[name] if name else expected))
    return np.stack([host.ids for host in found])


@pytest.mark.parametrize("make", [tokens, rows])
def test_ranks_and_a_resume_in_the_middle_change_nothing(make: object, tmp_path: Path) -> None:
    source = make(tmp_path)  # type: ignore[operator]
    epochs = 3 * len(source) // 12
    alone = take(source, epochs)
    for world in (2, 3):
        ranks = [take(source, epochs, batch=12 // world, rank=rank, world=world) for rank in range(world)]
        np.testing.assert_array_equal(np.concatenate(ranks, axis=1), alone)
    middle = epochs // 2 + 1
    np.testing.assert_array_equal(take(source, epochs - middle, position=middle * 12), alone[middle:])
    # Two micro-batches make a step of 12 samples, on one rank and on two.
    np.testing.assert_array_equal(take(source, 2 * epochs, batch=6).reshape(-1, 12), alone)


def test_reading_processes_change_nothing(tmp_path: Path) -> None:
    source = rows(tmp_path)
    np.testing.assert_array_equal(take(source, 20, workers=2), take(source, 20))


def test_grouping_saves_padding_and_is_part_of_where_a_run_stands(tmp_path: Path) -> None:
    source = rows(tmp_path)
    with Loader(source, lambda host, _: host, batch=12) as loader:
        state = loader.state_dict()
        assert state["group"] == 12
        by_length = loader.padding_share
    source.group_by_length = False
    with Loader(source, lambda host, _: host, batch=12) as loader:
        assert by_length is not None
        assert loader.padding_share is not None
        assert by_length < 0.1 < 0.25 < loader.padding_share
        with pytest.raises(DataError, match=r"a sample stream with group 12, but .* has group 0"):
            loader.load_state_dict(state)
