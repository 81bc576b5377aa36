from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.sampler import Stream, padding_share, permutation

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


def lengths_of(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).integers(1, 100, samples).astype(np.int32)


@given(samples=sizes, group=st.integers(1, 16), seed=st.integers(0, 9))
def test_grouping_by_length_loses_and_repeats_nothing(samples: int, group: int, seed: int) -> None:
    stream = Stream(samples, seed, lengths_of(samples), group)
    ids = stream.ids(0, 5 * samples).reshape(5, samples)
    for epoch in ids:
        assert sorted(epoch.tolist()) == list(range(samples))


def test_the_grouped_order_is_pinned() -> None:
    stream = Stream(10, 3, np.arange(10, dtype=np.int32), 4)
    assert stream.ids(0, 20).tolist() == [
        4, 3, 0, 2, 9, 8, 5, 7, 6, 1, 9, 1, 5, 8, 7, 6, 0, 3, 2, 4
    ]  # fmt: skip


@given(
    samples=st.integers(20, 200), batch=st.integers(1, 5), world=st.integers(1, 4), epoch=st.integers(0, 4)
)
def test_any_number_of_ranks_reads_the_same_groups(samples: int, batch: int, world: int, epoch: int) -> None:
    lengths, group = lengths_of(samples), batch * world
    start = -(-epoch * samples // group) * group
    alone = Stream(samples, 1, lengths, group).ids(start, start + group)
    ranks = [
        Stream(samples, 1, lengths, group).ids(start + r * batch, start + (r + 1) * batch)
        for r in range(world)
    ]
    np.testing.assert_array_equal(np.concatenate(ranks), alone)


def test_batches_inside_an_epoch_hold_similar_lengths_wherever_the_epoch_begins() -> None:
    samples, group = 5003, 8
    lengths = lengths_of(samples)
    plain = Stream(samples, 0).ids(0, 3 * samples)
    by_length = Stream(samples, 0, lengths, group).ids(0, 3 * samples)
    assert padding_share(lengths[plain], group) > 0.4
    assert padding_share(lengths[by_length], group) < 0.05
    assert len({tuple(by_length[epoch * samples :][:64]) for epoch in range(3)}) == 3


def test_no_rank_always_gets_the_longest() -> None:
    samples, group = 4096, 8
    lengths = np.random.default_rng(0).permutation(samples).astype(np.int32)
    batches = lengths[Stream(samples, 0, lengths, group).ids(0, samples)].reshape(-1, group)
    places = batches.argmax(axis=1)
    assert np.bincount(places, minlength=group).min() > samples / group / group / 2


def test_padding_is_what_the_longest_leaves() -> None:
    assert padding_share(np.array([1, 3, 2], np.int32), 2) == 1 - 6 / 8
    assert padding_share(np.array([5], np.int32), 4) == 0
