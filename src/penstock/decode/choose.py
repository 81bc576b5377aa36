"""Choosing the next token from logits by the settings of `Decoding`.

Shapes: R rows, one for each text; V vocabulary; L tokens that are there, the newest last, −1 before a text's first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.dtypes import widened
from penstock.kernels.beams import NOTHING as NOTHING
from penstock.kernels.top import largest, top

_NUCLEUS = 1024
"""Likeliest tokens that are tried for `top_p` first; a sort of all is slow."""


def adjust_logits(
    logits: Tensor, settings: Decoding, history: Tensor | None, new: Tensor | int, ends: Tensor | None
) -> Tensor:
    """Logits (R, V), or log-probabilities, after bias, penalties, blocked n-grams and the least number of tokens.

    history (R, L): needed where `settings.looks_back`. `new` of them have been generated: a number, or (R, 1). `ends`
    are the numbers that end a text. Returns a new tensor where anything changes.
    """
    if settings.bias:
        numbers, amounts = zip(*settings.biases, strict=True)
        more = torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(
            1, torch.tensor(numbers, device=logits.device), more.expand(len(logits), -1)
        )
    if settings.looks_back:
        assert history is not None
        logits = _penalise(logits, settings, history, new)
    if ends is not None and settings.min_tokens:
        early = torch.as_tensor(new, device=logits.device).reshape(-1, 1) < settings.min_tokens
        blocked = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device).index_fill(
            0, ends, True
        )
        logits = logits.masked_fill(early & blocked, -math.inf)
    return logits


def _penalise(logits: Tensor, settings: Decoding, history: Tensor, new: Tensor | int) -> Tensor:
    rows, size = logits.shape
    wide = torch.cat([logits, logits.new_zeros(rows, 1)], dim=1)  # the last column takes what is no token
    places = torch.where(history < 0, size, history)
    if settings.repetition_penalty != 1.0:
        present = wide.gather(1, places)
        penalty = settings.repetition_penalty
        wide = wide.scatter(1, places, torch.where(present < 0, present * penalty, present / penalty))
    if settings.frequency_penalty or settings.presence_penalty:
        length = history.shape[1]
        behind = length - torch.arange(length, device=history.device)
        generated = torch.where(behind <= new, places, size)
        ones = torch.ones_like(generated, dtype=wide.dtype)
        counts = torch.zeros_like(wide).scatter_add_(1, generated, ones)
        wide = wide - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
    if settings.no_repeat_ngram and history.shape[1] >= settings.no_repeat_ngram:
        grams = history.unfold(1, settings.no_repeat_ngram, 1)  # (R, L − n + 1, n)
        newest = history[:, history.shape[1] - settings.no_repeat_ngram + 1 :]
        again = (grams[..., :-1] == newest[:, None]).all(-1) & (grams >= 0).all(-1)
        repeating = torch.where(again, grams[..., -1], size)
        blocked = torch.zeros_like(wide, dtype=torch.bool).scatter_(1, repeating, True)
        wide = wide.masked_fill(blocked, -math.inf)
    return wide[:, :size]


def shares(logits: Tensor, settings: Decoding) -> tuple[Tensor, Tensor | None]:
    """Probabilities (R, C) with which candidates are drawn, and the candidates' numbers (R, C); None where they are
    the whole vocabulary. They need not add up to 1.
    """
    logits = logits.float() / settings.temperature
    size = logits.shape[1]
    if settings.top_k and settings.top_k < size:
        values, numbers = top(logits, settings.top_k)
        probabilities = torch.softmax(values, dim=-1)
    elif settings.top_p < 1.0:
        probabilities, numbers = _nucleus(torch.softmax(logits, dim=-1), settings.top_p)
    else:
        probabilities = torch.softmax(logits, dim=-1)
        if settings.min_p:
            least = settings.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return probabilities, None
    # Sorted, the likeliest first: those behind the first that reach top_p are dropped, but never the first itself.
    allowed = probabilities.cumsum(-1) - probabilities < settings.top_p
    if settings.min_p:
        allowed &= probabilities >= settings.min_p * probabilities[:, :1]
    allowed[:, 0] = True
    return probabilities * allowed, numbers


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens that have this probability together, and perhaps more; the likeliest first."""
    size = probabilities.shape[1]
    if probabilities.device.type == "cpu" and size > _NUCLEUS:
        values, numbers = top(probabilities, _NUCLEUS)
        if bool((values.sum(-1) >= top_p).all()):
            return values, numbers
    return probabilities.sort(dim=-1, descending=True)


def choose_tokens(logits: Tensor, settings: Decoding, uniform: Tensor | None) -> Tensor:
    """One token for each row: the likeliest, or drawn by a number `uniform` (R,) in [0, 1) for each row, so that a row
    draws the same whatever others are beside it.
    """
    if not settings.draws:
        return largest(logits)
    assert uniform is not None
    probabilities, numbers = shares(logits, settings)
    sums = probabilities.double().cumsum(-1)
    targets = uniform.double()[:, None] * sums[:, -1:]
    places = torch.searchsorted(sums, targets, right=True)
    # Rounding must not lead behind the last token that can be drawn.
    last = probabilities.shape[1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1, keepdim=True)
    places = torch.minimum(places, last)
    return (places if numbers is None else numbers.gather(1, places)).squeeze(1)


def next_tokens(
    logits: Tensor,
    settings: Decoding,
    history: Tensor | None,
    new: Tensor | int,
    ends: Tensor | None,
    uniform: Tensor | None,
) -> Tensor:
    """The next token (R,) after logits (R, V), with the arguments of `adjust_logits` and `choose_tokens`. Logits in
    half precision are converted to single."""
    wide = widened(logits)
    return choose_tokens(adjust_logits(wide, settings, history, new, ends), settings, uniform)


def history_of(tokens: Tensor, lengths: Tensor | int) -> Tensor:
    """The first `lengths`, (R, 1) or one for all, of tokens (R, P), with the last at the right."""
    length = tokens.shape[1]
    if isinstance(lengths, int):
        return tokens[:, :lengths]
    places = torch.arange(length, device=tokens.device) - (length - lengths)
    return torch.where(places >= 0, tokens.gather(1, places.clamp(min=0)), NOTHING)
