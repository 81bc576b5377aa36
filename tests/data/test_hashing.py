from __future__ import annotations

import numpy as np

from penstock.data.hashing import generator, uniforms, words


def test_numbers_are_pinned() -> None:
    """A stored run must draw the same numbers under any later version."""
    assert words(7, 1, counters=np.arange(3, dtype=np.uint64)).tolist() == [
        257170485789458773,
        15227046546881415352,
        13963872221682997404,
    ]
    np.testing.assert_allclose(
        uniforms(7, 3, counters=np.array([5]), columns=3)[0], [0.7855408, 0.7223217, 0.9934703], atol=1e-7
    )


def test_a_row_depends_on_its_counter_alone() -> None:
    whole = uniforms(1, 2, counters=np.arange(100), columns=8)
    parts = [uniforms(1, 2, counters=np.arange(start, start + 10), columns=8) for start in range(0, 100, 10)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(uniforms(1, 2, counters=np.array([42]), columns=3)[0], whole[42, :3])


def test_numbers_are_uniform_and_uncorrelated() -> None:
    table = uniforms(0, 3, counters=np.arange(20_000), columns=6)
    assert table.min() >= 0
    assert table.max() < 1
    for column in table.T:
        counts = np.bincount((column * 20).astype(int), minlength=20)
        # 99.99 % quantile of chi-squared with 19 degrees of freedom: 50.8
        assert ((counts - 1000) ** 2 / 1000).sum() < 50.8
    off_diagonal = np.corrcoef(table.T) - np.eye(6)
    assert abs(off_diagonal).max() < 0.03  # 4 standard deviations of 20,000 samples
    assert abs(np.corrcoef(table[:-1, 0], table[1:, 0])[0, 1]) < 0.03


def test_seeds_and_purposes_give_other_numbers() -> None:
    counters = np.arange(1000)
    tables = [
        uniforms(*keys, counters=counters, columns=1)[:, 0] for keys in ((0, 1), (1, 0), (0, 2), (-1, 1))
    ]
    for i, first in enumerate(tables):
        for second in tables[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.13
            assert (first == second).mean() < 0.01


def test_generators_of_equal_keys_are_equal() -> None:
    assert generator(1, 2, 3).random() == generator(1, 2, 3).random()
    assert generator(1, 2, 3).random() != generator(1, 2, 4).random()
