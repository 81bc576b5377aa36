"""Scores made of sums, held to the libraries that compute them from all samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.tasks.scores import (
    bleu,
    bleu_sums,
    chance_words,
    chrf,
    chrf_sums,
    class_scores,
    number_scores,
    search_scores,
)

SAID = ["the cat sat on a mat", "forty two", "", "nothing of the kind was said here today", "a b"]
MEANT = ["the cat sat on the mat", "forty-two", "one", "something of that kind was said here", "a b"]


@pytest.mark.parametrize(
    ("share", "classes", "samples", "chance"),
    [(0.107, 10, 355, True), (0.2, 10, 355, False), (0.6, 2, 20, True), (0.8, 2, 20, False), (1.0, 1, 20, False),
     (0.0, 10, 355, True), (1.0, 0, 20, False)],
)  # fmt: skip
def test_what_guessing_gives_is_called_chance(share: float, classes: int, samples: int, chance: bool) -> None:
    words = chance_words(share, classes, samples)
    assert bool(words) == chance
    if chance:
        assert words.startswith(f"{100 * share:.1f} % is no more than chance for {classes} classes: ")


@pytest.mark.parametrize(("share", "samples", "few"), [(1.0, 4, True), (0.0, 1, True), (1.0, 5, False)])
def test_few_samples_tell_nothing_of_two_classes(share: float, samples: int, few: bool) -> None:
    words = chance_words(share, 2, samples)
    assert words.startswith(f"{samples} validation samples are too few to tell") == few
    assert "100.0 %" not in words


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_of_classes_are_scikit_learns(classes: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    true = random.integers(0, classes, 200)
    told = np.where(random.random(200) < 0.6, true, random.integers(0, classes, 200))
    counts = [np.bincount(which, minlength=classes) for which in (true[true == told], told, true)]
    found = class_scores(*np.array(counts, np.float64))
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(true, told),
            "f1": metrics.f1_score(true, told, average="binary" if classes == 2 else "macro"),
            "matthews": metrics.matthews_corrcoef(true, told),
        }
    )


def test_one_class_alone_correlates_with_nothing() -> None:
    found = class_scores(np.array([5.0, 0]), np.array([5.0, 0]), np.array([5.0, 0]))
    assert found == {"accuracy": 1.0, "f1": 0.0, "matthews": 0.0}


def test_correlations_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    true = random.integers(0, 6, 300).astype(np.float64)  # with ties
    told = np.round(true + random.normal(size=300), 1)
    found = number_scores(told, true)
    assert found["pearson"] == pytest.approx(stats.pearsonr(told, true).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(told, true).statistic)
    assert number_scores(np.ones(4), true[:4]) == {"pearson": 0.0, "spearman": 0.0}


def test_recall_counts_what_is_nearer() -> None:
    angles = np.linspace(0, 1.5, 12)
    answers = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    asked = answers.copy()
    asked[0] = answers[6]  # six or more others are nearer to it than its own
    found = search_scores(asked, answers, 0.05)
    assert found["recall_at_1"] == pytest.approx(11 / 12)
    assert found["recall_at_5"] == pytest.approx(11 / 12)
    near = asked @ answers.T / 0.05
    expected = np.log(np.exp(near).sum(1)) - np.diag(near)
    assert found["loss"] == pytest.approx(expected.mean())


def test_scores_of_texts_are_sacrebleus_of_the_whole() -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    for said, meant in ((SAID, MEANT), (SAID[:1], MEANT[:1]), ([""], ["a"])):
        pairs = list(zip(said, meant, strict=True))
        found = chrf(np.sum([chrf_sums(*pair) for pair in pairs], axis=0))
        assert found == pytest.approx(metrics.CHRF().corpus_score(said, [meant]).score)
        found = bleu(np.sum([bleu_sums(*pair) for pair in pairs], axis=0))
        assert found == pytest.approx(metrics.BLEU(effective_order=True).corpus_score(said, [meant]).score)
    assert math.isclose(chrf(chrf_sums("abc def", "abc def")), 100.0)
    # Not 0 because there are no four words: the translator of days in docs/how-to/translation.md.
    same = bleu_sums("Montag um 9", "Montag um 9")
    assert bleu(same) == pytest.approx(100.0)
