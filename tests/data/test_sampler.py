from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.sampler import Stream, permutation

sizes = st.integers(1, 40)


def test_the_order_is_pinned() -> None:
    """Resuming under a later version must go on with the same order."""
    assert permutation(seed=3, epoch=1, samples=10).tolist() == [9, 1, 5, 0, 8, 7, 3, 2, 4, 6]


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), samples=sizes)
def test_an_epoch_holds_each_sample_once(seed: int, epoch: int, samples: int) -> None:
    assert sorted(permutation(seed, epoch, samples).tolist()) == list(range(samples))


@given(seed=st.integers(0, 99), samples=sizes, start=st.integers(0, 200), length=st.integers(0, 100))
def test_any_cut_of_the_stream_is_a_cut_of_the_epochs(
    seed: int, samples: int, start: int, length: int
) -> None:
    epochs = np.concatenate([permutation(seed, epoch, samples) for epoch in range(300 // samples + 2)])
    np.testing.assert_array_equal(
        Stream(samples, seed).ids(start, start + length), epochs[start : start + length]
    )


@given(samples=sizes, batch=st.integers(1, 7), world=st.integers(1, 5), position=st.integers(0, 60))
def test_ranks_together_read_what_one_would(samples: int, batch: int, world: int, position: int) -> None:
    alone = Stream(samples, 1).ids(position, position + batch * world)
    ranks = [
        Stream(samples, 1).ids(position + rank * batch, position + (rank + 1) * batch)
        for rank in range(world)
    ]
    np.testing.assert_array_equal(np.concatenate(ranks), alone)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_shuffling_is_unbiased() -> None:
    """Every sample is first about equally often: 10,000 epochs of 10 samples."""
    first = np.bincount([permutation(0, epoch, 10)[0] for epoch in range(10_000)], minlength=10)
    assert ((first - 1000) ** 2 / 1000).sum() < 33.7  # 99.99 % of chi-squared, 9 degrees of freedom


def test_a_stream_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Stream(0, 0)
