"""One step of beam search: choose the tokens that continue the beams, and find the texts that have ended.

A step adds the log-probabilities of the next tokens to the scores of the beams, and keeps the best K candidates of each
text. Candidates among the best b that end replace worse finished texts; the best b of the remaining candidates
continue. Which candidates are kept, when a beam has finished and when a search ends follows transformers.

Texts are not copied: a step returns the parent of each new beam, and a finished text is stored as an integer code:

    step of its last token · 2^40 + parent beam · 2^32 + its last token + 1, or 0 if the last token ends the text

Forms: `plain_step`, a few torch operations, is the reference. On a GPU with Triton two kernels do the same: see
kernels/triton/beam_step.py.

Shapes: B texts, b beams, K candidates of a text, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.beams import NOTHING, OUT, Beams, Step, Terms
from penstock.kernels.has_triton import have_triton, interpreting
from penstock.kernels.top import likeliest, top

MOST_BEAMS = 256
_STEP, _BEAM = 40, 32
_MOST_KEPT = 64
"""Most candidates per text for the Triton kernels, which handle them one after the other."""


def beam_step(logits: Tensor, beams: Beams, step: int, terms: Terms, *, normed: bool = False) -> Step:
    """Make one step from logits (B·b, V) of the next tokens, or from log-probabilities if `normed`."""
    candidates = min(terms.kept, terms.size * logits.shape[1])
    fused = logits.is_cuda or interpreting()
    if fused and have_triton() and candidates <= _MOST_KEPT and logits.dtype != torch.float64:
        from penstock.kernels.triton import beam_step as kernels

        if kernels.fits(terms, logits.shape[1]):
            return kernels.launch(logits, beams, step, terms, normed=normed)
    return plain_step(logits, beams, step, terms, normed=normed)


def plain_step(logits: Tensor, beams: Beams, step: int, terms: Terms, *, normed: bool = False) -> Step:
    """The reference of `beam_step`. On a CPU it skips the work for finished texts in steps where none ends."""
    rows, size = beams.scores.shape
    # No beam can have more than this among the best K.
    values, tokens = (top if normed else likeliest)(logits, min(terms.kept, logits.shape[1]))
    each = values.shape[1]
    totals = (values.view(rows, size, each) + beams.scores[:, :, None]).view(rows, size * each)
    scores, places = totals.topk(min(terms.kept, size * each))
    parents = places // each
    chosen = tokens.view(rows, size * each).gather(1, places)
    ending = _ending(chosen, terms)
    if ending is not None or step + 1 == terms.steps:
        beams = _ended(beams, scores, parents, chosen, ending, step, terms)
    if ending is not None:
        scores, on = (scores + ending * OUT).topk(size)
        parents, chosen = parents.gather(1, on), chosen.gather(1, on)
    else:
        scores, parents, chosen = scores[:, :size], parents[:, :size], chosen[:, :size]
    hopeful = beams.hopeful
    if not beams.fresh:
        # Whether the best beam, at its most favourable length, beats the worst finished text.
        best = scores[:, :1] / terms.divisors(step)[1]
        worst = torch.where(beams.finished, beams.done_scores.amin(1, keepdim=True), OUT)
        hopeful = hopeful & (best > worst).any(1, keepdim=True)
    return Step(beams._replace(scores=scores, hopeful=hopeful), parents, chosen)


def _ending(chosen: Tensor, terms: Terms) -> Tensor | None:
    """Which tokens end a text; None if none of them does, as far as the host knows without waiting."""
    if not terms.stops:
        return None
    ending = chosen == terms.stops[0]
    for stop in terms.stops[1:]:
        ending = ending | (chosen == stop)
    return None if chosen.device.type == "cpu" and not bool(ending.any()) else ending


def _ended(
    beams: Beams, scores: Tensor, parents: Tensor, chosen: Tensor, ending: Tensor | None, step: int,
    terms: Terms,
) -> Beams:  # fmt: skip
    """Replace finished texts by candidates, among the best b, that end now and score better."""
    size = beams.scores.shape[1]
    tokens = chosen + 1 if ending is None else torch.where(ending, 0, chosen + 1)
    codes = (tokens + (parents << _BEAM))[:, :size] + (step << _STEP)
    scores = scores[:, :size] / terms.divisors(step)[0]
    shut = ~beams.hopeful
    if terms.stopping == "full":
        shut = shut | beams.finished.all(1, keepdim=True)
    if ending is None or step + 1 == terms.steps:
        counts = torch.ones_like(beams.finished)
    else:
        counts = ending[:, :size]
    scores = scores.masked_fill(~counts | shut, OUT)
    done_scores, best = torch.cat([beams.done_scores, scores], dim=1).topk(size)
    return beams._replace(
        done_scores=done_scores, done=torch.cat([beams.done, codes], dim=1).gather(1, best),
        finished=torch.cat([beams.finished, counts], dim=1).gather(1, best), fresh=False,
    )  # fmt: skip


def texts_of(codes: Tensor, parents: list[Tensor], chosen: list[Tensor], steps: int) -> Tensor:
    """Tokens (B, n, steps) of the texts with these codes (B, n), −1 after the last; `parents` and `chosen` of all
    steps."""
    last_steps, beams = codes >> _STEP, (codes >> _BEAM) & (MOST_BEAMS - 1)
    tokens = torch.full((*codes.shape, steps), NOTHING, device=codes.device)
    tokens.scatter_(2, last_steps[:, :, None], ((codes & ((1 << _BEAM) - 1)) - 1)[:, :, None])
    for step in range(len(chosen) - 1, -1, -1):
        before = step < last_steps
        tokens[:, :, step] = torch.where(before, chosen[step].gather(1, beams), tokens[:, :, step])
        beams = torch.where(before, parents[step].gather(1, beams), beams)
    return tokens
