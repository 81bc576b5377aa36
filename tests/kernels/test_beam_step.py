"""A step of beam search: codes of texts that ended, and Triton's kernels against the plain form."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from penstock.kernels.beam_step import beam_step, plain_step, texts_of
from penstock.kernels.beams import NOTHING, Beams, Step, Terms
from penstock.kernels.top import likeliest

CASES = [
    (50, Terms(size=3, steps=6, stops=(4,))),
    (50, Terms(size=4, steps=5, stops=(1, 8, 9), length_penalty=0.6, stopping="never")),
    (70, Terms(size=1, steps=5, stops=(3,), stopping="full")),
    (40, Terms(size=5, steps=3)),
    (5000, Terms(size=2, steps=5, stops=(2,), length_penalty=-1.0, stopping="full")),
]
"""A vocabulary and the terms of a search over it; the last takes two programs for each beam."""
KERNEL = "beam_step"
MUTANTS = [
    (KERNEL, "tl.exp(left - below), 0)", "tl.exp(left - most - 1.0), 0)"),
    (KERNEL, "left = tl.where(lane == where, _NONE, left)", "left = left"),
    (KERNEL, "part * SPAN + where", "where"),
    (KERNEL, "tl.sum(total * tl.exp(most - top[:, None]), 1)", "tl.sum(total, 1)"),
    (KERNEL, "(ending | (last != 0)) & own", "ending & own"),
    (KERNEL, "best / divisor", "best"),
    (KERNEL, "(parent << 32)", "(parent << 31)"),
    (KERNEL, "tl.where(newer, new_code, there_code)", "there_code"),
    (KERNEL, "tl.where(ending, best + _OUT, best), _NONE)", "best, _NONE)"),
    (KERNEL, "tl.max(on, 0) / ahead", "tl.max(on, 0)"),
]


def logits_of(rows: int, words: int, terms: Terms, draw: random.Random, device: str) -> Tensor:
    """Drawn ones, among which texts often end."""
    found = torch.randn(rows, words, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) * 3
    for stop in terms.stops:
        found[:, stop] += 5 * (torch.rand(rows, generator=torch.Generator().manual_seed(stop)) < 0.5)
    found[:, 0] = -torch.inf
    return found.to(device)


def check(device: str) -> None:
    """Whole searches, each step by both forms."""
    draw = random.Random(0)
    for words, terms in CASES:
        for normed in (False, True):
            beams = Beams.first(2, terms.size, torch.float32, torch.device(device))
            ended = 0
            for step in range(terms.steps):
                logits = logits_of(2 * terms.size, words, terms, draw, device)
                logits = torch.log_softmax(logits, -1) if normed else logits
                expected = plain_step(logits, beams, step, terms, normed=normed)
                found = beam_step(logits, beams, step, terms, normed=normed)
                assert not found.beams.fresh, "this is the plain form"
                _same(found, expected, last=step + 1 == terms.steps)
                beams = expected.beams
                ended = int(beams.finished.sum())
            assert ended == 2 * terms.size


def _same(found: Step, expected: Step, *, last: bool) -> None:
    torch.testing.assert_close(found.beams.done_scores, expected.beams.done_scores)
    there = expected.beams.finished
    assert torch.equal(found.beams.finished, there)
    assert torch.equal(found.beams.done[there], expected.beams.done[there])
    if last:
        return
    torch.testing.assert_close(found.beams.scores, expected.beams.scores)
    assert torch.equal(found.parents, expected.parents)
    assert torch.equal(found.chosen, expected.chosen)
    # The plain form on a CPU does not look ahead while nothing has ended.
    assert torch.equal(found.beams.hopeful, expected.beams.hopeful)


def test_texts_are_read_back_from_codes() -> None:
    draw, beams, steps = random.Random(1), 3, 6
    texts: list[list[list[int]]] = [[[] for _ in range(beams)] for _ in range(2)]
    parents, chosen, codes, expected = [], [], [], []
    for step in range(steps):
        beam, ends = draw.randrange(beams), draw.random() < 0.5
        last = draw.randrange(99)
        told = [[*text[beam], *([] if ends else [last])] for text in texts]
        expected.append([[*text, *[NOTHING] * (steps - len(text))] for text in told])
        codes.append([(step << 40) + (beam << 32) + (0 if ends else last + 1)] * 2)
        lines = [[draw.randrange(beams) for _ in range(beams)] for _ in range(2)]
        tokens = [[draw.randrange(99) for _ in range(beams)] for _ in range(2)]
        texts = [
            [[*text[line], token] for line, token in zip(*both, strict=True)]
            for text, *both in zip(texts, lines, tokens, strict=True)
        ]
        parents.append(torch.tensor(lines))
        chosen.append(torch.tensor(tokens))
    found = texts_of(torch.tensor(codes).T, parents, chosen, steps)
    assert found.transpose(0, 1).tolist() == expected


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("size", [58_101, 300, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_are_those_of_a_softmax(
    size: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("penstock.kernels.top.takes_rows", lambda _: False)
    x = torch.randn(9, size).to(dtype)
    x[:, 0] = -torch.inf
    values, places = likeliest(x, 6)
    expected = torch.log_softmax(x, -1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(values, expected.topk(6).values)
    torch.testing.assert_close(expected.gather(1, places), values)
    assert torch.equal(likeliest(x[3:4], 6)[0], values[3:4]), "whatever is beside it"
