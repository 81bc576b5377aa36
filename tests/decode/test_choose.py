"""Choosing tokens: each setting changes logits as transformers' processor does, and draws have their probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config.decoding import Decoding
from penstock.decode.choose import NOTHING, adjust_logits, choose_tokens, shares
from penstock.errors import ConfigError

transformers = pytest.importorskip("transformers")
PROCESSORS: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = [
    ({"repetition_penalty": 1.7}, "RepetitionPenaltyLogitsProcessor", (1.7,)),
    ({"no_repeat_ngram": 2}, "NoRepeatNGramLogitsProcessor", (2,)),
    ({"no_repeat_ngram": 1}, "NoRepeatNGramLogitsProcessor", (1,)),
    ({"no_repeat_ngram": 9}, "NoRepeatNGramLogitsProcessor", (9,)),
    ({"bias": ("3=2.5", "7=-1")}, "SequenceBiasLogitsProcessor", ([[[3], 2.5], [[7], -1.0]],)),
]


@pytest.mark.parametrize(("given", "name", "arguments"), PROCESSORS)
def test_logits_change_as_transformers_changes_them(
    given: dict[str, Any], name: str, arguments: tuple[Any, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 12, (5, 20), generator=generator)
    logits = torch.randn(5, 12, generator=generator)
    theirs = getattr(transformers, name)(*arguments)(history, logits.clone())
    torch.testing.assert_close(adjust_logits(logits, Decoding(**given), history, 3, None), theirs)


def test_what_fills_a_history_up_changes_nothing() -> None:
    history = torch.tensor([[3, 4, 3, 5]])
    padded = torch.cat([torch.full((1, 3), NOTHING), history], dim=1)
    logits = torch.randn(1, 12)
    settings = Decoding(
        repetition_penalty=1.3, no_repeat_ngram=2, frequency_penalty=0.5, presence_penalty=0.25
    )
    torch.testing.assert_close(
        adjust_logits(logits, settings, padded, 3, None),
        adjust_logits(logits, settings, history, 3, None),
        rtol=0,
        atol=0,
    )


def test_frequency_and_presence_count_what_was_generated() -> None:
    history = torch.tensor([[1, 2, 2, 3], [2, 2, 2, 2]])
    settings = Decoding(frequency_penalty=0.5, presence_penalty=0.25)
    changed = adjust_logits(torch.zeros(2, 5), settings, history, torch.tensor([[3], [1]]), None)
    torch.testing.assert_close(changed, torch.tensor([[0, 0, -1.25, -0.75, 0], [0, 0, -0.75, 0, 0]]))


@pytest.mark.parametrize(
    ("given", "warpers"),
    [
        ({"top_k": 5}, [("TopKLogitsWarper", 5)]),
        ({"top_p": 0.7}, [("TopPLogitsWarper", 0.7)]),
        ({"min_p": 0.1}, [("MinPLogitsWarper", 0.1)]),
        ({"top_k": 9, "top_p": 0.8, "min_p": 0.15}, [("TopKLogitsWarper", 9), ("TopPLogitsWarper", 0.8),
         ("MinPLogitsWarper", 0.15)]),
    ],
)  # fmt: skip
def test_the_tokens_that_may_be_drawn_are_transformers(
    given: dict[str, Any], warpers: list[tuple[str, Any]]
) -> None:
    logits = torch.randn(20, 2000, generator=torch.Generator().manual_seed(1)) * 2
    theirs = logits / 0.8
    for name, value in warpers:
        theirs = getattr(transformers, name)(value)(None, theirs)
    theirs = torch.softmax(theirs, dim=-1)
    found, numbers = shares(logits, Decoding(temperature=0.8, **given))
    if numbers is not None:
        found = torch.zeros_like(logits).scatter(1, numbers, found)
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_draws_have_their_probabilities(given: dict[str, Any]) -> None:
    """Pearson's chi-square test, at a level of one in a thousand."""
    from scipy.stats import chisquare

    settings = Decoding(temperature=1.0, **given)
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
    count = 20_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drawn = torch.bincount(choose_tokens(logits.expand(count, -1), settings, uniform), minlength=5)
    found, numbers = shares(logits[None], settings)
    if numbers is not None:
        found = torch.zeros(1, 5).scatter(1, numbers, found)
    expected = found[0] / found.sum()
    assert not drawn[expected == 0].any()
    live = expected > 0
    expected = expected[live].double()
    assert chisquare(drawn[live].numpy(), (expected / expected.sum() * count).numpy()).pvalue > 1e-3


def test_the_ends_of_the_unit_interval_draw_tokens_that_may_be_drawn() -> None:
    logits = torch.tensor([[0.0, 5.0, -200.0], [-200.0, 5.0, 0.0]])
    settings = Decoding(temperature=1.0)
    low, high = torch.zeros(2), torch.full((2,), 1.0 - 2**-24)
    assert choose_tokens(logits, settings, low).tolist() == [0, 1]
    assert choose_tokens(logits, settings, high).tolist() == [1, 2]


def test_settings_that_contradict_each_other_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Decoding(beams=4, temperature=1.0, max_tokens=100, min_tokens=200, stop=("",))
    assert len(caught.value.problems) == 3
