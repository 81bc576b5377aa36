"""Choosing the next token from logits by the settings of `Decoding`.

Shapes: R rows, one per text; V vocabulary; L earlier tokens, the newest last, with −1 before a text's first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.dtypes import widened
from penstock.kernels.beams import NOTHING as NOTHING
from penstock.kernels.top import largest, top

_NUCLEUS = 1024
"""Number of likeliest tokens that are tried first for `top_p`, because sorting the whole vocabulary is slow."""


def adjust_logits(
    logits: Tensor, settings: Decoding, history: Tensor | None, new: Tensor | int, ends: Tensor | None,
    prompt: Tensor | int = 0,
) -> Tensor:  # fmt: skip
    """Logits (R, V), or log-probabilities, after biases, penalties, blocked n-grams, minimum length and forced tokens.

    `history` (R, L) holds all earlier tokens, if `settings.looks_back`. Of a text's tokens, `prompt` are its prompt and
    `new` were generated: numbers, or (R, 1). `ends` are the tokens that end a text. Returns a new tensor if anything
    changes.
    """
    for before, last, amounts in _biases(settings.bias, logits.dtype, logits.device):
        more, width = amounts.expand(len(logits), -1), before.shape[1]
        if width:
            assert history is not None
            if history.shape[1] < width:
                continue
            more = torch.where((history[:, None, -width:] == before).all(-1), amounts, 0.0)
        logits = logits.index_add(1, last, more)
    if settings.looks_back:
        assert history is not None
        logits = _penalise(logits, settings, history, new)
    if ends is not None and (settings.min_tokens or settings.min_length):
        total = torch.as_tensor(prompt + new, device=logits.device).reshape(-1, 1)
        early = (total - prompt < settings.min_tokens) | (total < settings.min_length)
        logits = torch.where(early, logits.index_fill(1, ends, -math.inf), logits)
    if settings.forced_first is not None:
        logits = _forced(logits, prompt + new == 1, (settings.forced_first,))
    if settings.forced_last:
        logits = _forced(logits, new == settings.max_tokens - 1, settings.forced_last)
    if settings.not_first:
        late = settings.forced_first is not None and prompt == 1
        numbers = torch.tensor(settings.not_first, device=logits.device)
        begins = torch.as_tensor(new == late, device=logits.device).reshape(-1, 1)
        logits = torch.where(begins, logits.index_fill(1, numbers, -math.inf), logits)
    return logits


@functools.lru_cache(maxsize=64)
def _biases(
    bias: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`Decoding.bias`, grouped by length: in each group tokens before the last (n, count), the last (n,), amounts
    (n,)."""
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for numbers, amount in Decoding(bias=bias).biases:
        groups.setdefault(len(numbers), []).append((numbers, amount))
    grouped = []
    for group in groups.values():
        tokens = torch.tensor([numbers for numbers, _ in group], device=device)
        amounts = torch.tensor([amount for _, amount in group], dtype=dtype, device=device)
        grouped.append((tokens[:, :-1], tokens[:, -1], amounts))
    return grouped


def _forced(logits: Tensor, rows: Tensor | bool, tokens: tuple[int, ...]) -> Tensor:
    """Logits in which, in the marked `rows`, every token but `tokens` is −∞."""
    if rows is False:
        return logits
    forced = torch.full_like(logits, -math.inf)
    forced[:, list(tokens)] = 0.0
    return torch.where(torch.as_tensor(rows, device=logits.device).reshape(-1, 1), forced, logits)


def _penalise(logits: Tensor, settings: Decoding, history: Tensor, new: Tensor | int) -> Tensor:
    rows, size = logits.shape
    # The last column is for places without a token.
    wide = torch.cat([logits, logits.new_zeros(rows, 1)], dim=1)
    places = torch.where(history < 0, size, history)
    if settings.repetition_penalty != 1.0:
        present = wide.gather(1, places)
        penalty = settings.repetition_penalty
        wide = wide.scatter(1, places, torch.where(present < 0, present * penalty, present / penalty))
    if settings.frequency_penalty or settings.presence_penalty:
        length = history.shape[1]
        distance = length - torch.arange(length, device=history.device)
        generated = torch.where(distance <= new, places, size)
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
    """Probabilities (R, C) for drawing from candidates, and the candidates' token numbers (R, C), or None if these are
    the whole vocabulary. Probabilities need not add up to 1."""
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
    # Sorted, the likeliest first: candidates after those that together reach top_p are dropped, but never the first.
    allowed = probabilities.cumsum(-1) - probabilities < settings.top_p
    if settings.min_p:
        allowed &= probabilities >= settings.min_p * probabilities[:, :1]
    allowed[:, 0] = True
    return probabilities * allowed, numbers


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens with at least this total probability, and perhaps more, in descending order."""
    size = probabilities.shape[1]
    if probabilities.device.type == "cpu" and size > _NUCLEUS:
        values, numbers = top(probabilities, _NUCLEUS)
        if bool((values.sum(-1) >= top_p).all()):
            return values, numbers
    return probabilities.sort(dim=-1, descending=True)


def choose_tokens(logits: Tensor, settings: Decoding, uniform: Tensor | None) -> Tensor:
    """One token for each row: the likeliest, or drawn with the row's random number in `uniform` (R,), in [0, 1), so
    that a row's draw does not depend on the other rows."""
    if not settings.draws:
        return largest(logits)
    assert uniform is not None
    probabilities, numbers = shares(logits, settings)
    sums = probabilities.double().cumsum(-1)
    targets = uniform.double()[:, None] * sums[:, -1:]
    places = torch.searchsorted(sums, targets, right=True)
    # Rounding must not lead past the last token that can be drawn.
    last = probabilities.shape[1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1, keepdim=True)
    places = torch.minimum(places, last)
    return (places if numbers is None else numbers.gather(1, places)).squeeze(1)


def next_tokens(logits: Tensor, settings: Decoding, uniform: Tensor | None, *past: Any) -> Tensor:
    """The next token (R,) from logits (R, V), with the arguments of `choose_tokens` and `adjust_logits`. Logits in half
    precision are converted to fp32."""
    return choose_tokens(adjust_logits(widened(logits), settings, *past), settings, uniform)


def history_of(tokens: Tensor, lengths: Tensor | int) -> Tensor:
    """The first `lengths`, (R, 1) or one number, of tokens (R, P), right-aligned and filled with −1 on the left."""
    length = tokens.shape[1]
    if isinstance(lengths, int):
        return tokens[:, :lengths]
    places = torch.arange(length, device=tokens.device) - (length - lengths)
    return torch.where(places >= 0, tokens.gather(1, places.clamp(min=0)), NOTHING)
