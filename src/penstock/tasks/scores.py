"""Scores that are computed from sums: over classes, over pairs of numbers, and over texts. Sums of batches and of ranks
add up to the sums of the whole split, so that a score does not depend on how the split was distributed."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]

# -- classes


def class_scores(hits: Sums, predicted: Sums, true: Sums) -> dict[str, float]:
    """Accuracy, F1 and Matthews' correlation, from how often each class was right, predicted, and true: (C,) each.

    F1 is class 1's if there are two classes, else the mean over classes (Sokolova & Lapalme, 2009). Matthews'
    correlation of several classes is Gorodkin's (2004, eq. 8).
    """
    samples = true.sum()
    each = 2 * hits / np.maximum(predicted + true, 1)
    spread = (samples**2 - (predicted**2).sum()) * (samples**2 - (true**2).sum())
    joint = hits.sum() * samples - (predicted * true).sum()
    return {
        "accuracy": float(hits.sum() / samples),
        "f1": float(each[1] if len(each) == 2 else each.mean()),
        "matthews": float(joint / math.sqrt(spread)) if spread > 0 else 0.0,
    }


def chance_words(share: float, classes: int, samples: int) -> str:
    """A warning if a share of right answers is no better than guessing among `classes` on `samples` samples, plus two
    standard deviations, or if even all answers being right would not be better; else ""."""
    chance = 1.0 / max(classes, 1)
    guessed = chance + 2.0 * math.sqrt(chance * (1.0 - chance) / max(samples, 1))
    if classes < 2 or share > guessed:
        return ""
    if guessed >= 1.0:
        return (
            f"{samples} validation samples are too few to tell what the model learned: guessing among {classes} "
            "classes gets all of them right too often."
        )
    return (
        f"{100 * share:.1f} % is no more than chance for {classes} classes: the model has not learned to tell them "
        "apart. Train for more steps (--recipe.steps, --recipe.epochs), or try another rate (--recipe.lr)."
    )


# -- numbers


def number_scores(guesses: Sums, true: Sums) -> dict[str, float]:
    """Pearson's and Spearman's correlation of predicted numbers (N,) with the true ones."""
    return {"pearson": _correlation(guesses, true), "spearman": _correlation(_ranks(guesses), _ranks(true))}


def _correlation(first: Sums, second: Sums) -> float:
    first, second = first - first.mean(), second - second.mean()
    spread = math.sqrt(float((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / spread if spread > 0 else 0.0


def _ranks(values: Sums) -> Sums:
    """Ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[inverse], np.float64)


# -- search

RANKS = (1, 5, 10)


def search_scores(queries: Sums, answers: Sums, temperature: float) -> dict[str, float]:
    """Scores of unit vectors (N, D), where query i belongs to answer i: how often the answer is among the 1, 5 and 10
    nearest of all N, and the mean loss, in nats, of choosing it from all N."""
    places, losses = [], []
    for start in range(0, len(queries), 1024):
        near = queries[start : start + 1024] @ answers.T
        own = np.take_along_axis(near, np.arange(start, start + len(near))[:, None], 1)
        places.append((near > own).sum(axis=1))
        scaled = (near - own) / temperature
        most = scaled.max(axis=1, keepdims=True)
        losses.append(np.log(np.exp(scaled - most).sum(axis=1)) + most[:, 0])
    place = np.concatenate(places)
    return {
        "loss": float(np.concatenate(losses).mean()),
        **{f"recall_at_{rank}": float((place < rank).mean()) for rank in RANKS},
    }


# -- texts

ORDERS = 6
"""Longest n-gram of characters in chrF."""
_BETA = 2.0
CHRF_SUMS = 3 * ORDERS


def chrf_sums(written: str, reference: str) -> list[int]:
    """A text's contribution to chrF (Popović, WMT 2015): for n-grams of 1 to 6 characters, the numbers of shared,
    written and expected n-grams. White space is ignored."""
    counts: list[int] = []
    written, reference = "".join(written.split()), "".join(reference.split())
    for order in range(1, ORDERS + 1):
        grams, expected = (
            Counter(text[i : i + order] for i in range(len(text) - order + 1))
            for text in (written, reference)
        )
        counts += [(grams & expected).total(), grams.total(), expected.total()]
    return counts


def chrf(sums: Sequence[float]) -> float:
    """chrF2 in [0, 100], as in sacrebleu: F of the mean precision and recall over orders that both texts have."""
    orders = [sums[i : i + 3] for i in range(0, CHRF_SUMS, 3)]
    both = [(shared / written, shared / meant) for shared, written, meant in orders if written and meant]
    if not both:
        return 0.0
    precision, recall = (sum(values) / len(both) for values in zip(*both, strict=True))
    if not precision + recall:
        return 0.0
    return float(100 * (1 + _BETA**2) * precision * recall / (_BETA**2 * precision + recall))


@functools.cache
def has_bleu() -> bool:
    """Whether the package sacrebleu is installed."""
    return importlib.util.find_spec("sacrebleu") is not None


def bleu_sums(written: str, reference: str) -> list[int]:
    """A text's contribution to BLEU (Papineni et al., ACL 2002), by sacrebleu's tokenisation: shared and generated
    n-grams of one to four words, and both lengths."""
    score: Any = _sacrebleu().sentence_score(written, [reference])
    return [*score.counts, *score.totals, score.sys_len, score.ref_len]


def bleu(sums: Sequence[float]) -> float:
    """BLEU in [0, 100] from summed counts; if no text has four words, of the existing orders."""
    counts = [int(value) for value in sums]
    score = _sacrebleu().compute_bleu(
        counts[:4], counts[4:8], sys_len=counts[8], ref_len=counts[9], effective_order=True
    )
    return float(score.score)


@functools.cache
def _sacrebleu() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
