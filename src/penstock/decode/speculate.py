"""Speculative decoding: tokens are guessed ahead, and the model checks all guesses in one pass.

Guesses that the model agrees with are kept; the first other guess is replaced by the model's own token. Drawn tokens
keep the model's distribution exactly (Leviathan et al., ICML 2023, section 2.3). Guesses come from a smaller model with
the same vocabulary, or are the tokens that followed an earlier occurrence of the newest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.decode.choose import adjust_logits, shares
from penstock.decode.kv_cache import Columns, KVCache, run_pass
from penstock.dtypes import widened
from penstock.kernels.top import largest
from penstock.models.model import Model

_LONGEST = 3
"""Number of tokens at the end of the text that an earlier place must match; fewer if no place matches this many."""


class Guesses(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    shares: list[Tensor] | None = None
    """The probabilities (V,) that each token was drawn with; None: tokens were not drawn."""


Guess = Callable[[list[int], int], Guesses]
"""A function of a text's tokens and a number: it guesses at most that many next tokens."""


def look_up(ids: list[int], count: int) -> Guesses:
    """Guess the tokens that followed the newest ones at their last earlier occurrence (Saxena, 2023)."""
    for length in range(min(_LONGEST, len(ids) - 1), 0, -1):
        newest = ids[-length:]
        for place in range(len(ids) - length - 1, -1, -1):
            if ids[place : place + length] == newest:
                return Guesses(ids[place + length : place + length + count])
    return Guesses([])


class DraftedText:
    """One text that a model reads; its newest tokens can be undone."""

    def __init__(
        self, model: Model, columns: int, source: Sequence[int] = (), route: int | None = None
    ) -> None:
        self.model, self.read_count = model, 0
        self.device = next(model.parameters()).device
        self.source = torch.tensor([list(source)], device=self.device) if source else None
        self.routes: Tensor | None = None
        if model.graph.routed and route is not None:
            self.routes = torch.tensor([route], device=self.device)
        self.past = KVCache(Columns(1, columns), rows=1, columns=columns, device=self.device)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the next tokens; return logits (N, V) after each."""
        begin, end = self.read_count, self.read_count + len(tokens)
        places = torch.arange(begin, end, device=self.device)
        self.past.at(places, columns=begin, width=end, first=begin == 0, alone=len(tokens) == 1)
        batch = torch.tensor([list(tokens)], device=self.device)
        self.read_count = end
        source = None if self.past.remembers else self.source
        return run_pass(self.model, self.past, batch, source=source, routes=self.routes)


class Chooser:
    """Chooses tokens of one text by the settings of `Decoding`."""

    def __init__(self, decoding: Decoding, prompt: int, ends: Sequence[int], device: torch.device) -> None:
        self.decoding, self.prompt = decoding, prompt
        stops = [] if decoding.ignore_end else list(ends)
        self.stops = torch.tensor(stops, device=device) if stops else None
        self.random = random.Random(decoding.seed) if decoding.seed is not None else random.Random()

    def changed(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits (V,) that follow `ids`, with penalties and biases."""
        history = torch.tensor([list(ids)], device=logits.device) if self.decoding.looks_back else None
        wide = widened(logits)
        past = history, len(ids) - self.prompt, self.stops, self.prompt
        return adjust_logits(wide[None], self.decoding, *past)[0]

    def shares(self, logits: Tensor) -> Tensor:
        """The probabilities (V,) in fp64 that a token is drawn with."""
        probabilities, numbers = shares(logits[None], self.decoding)
        probabilities = probabilities.double()
        if numbers is not None:
            probabilities = probabilities.new_zeros(1, len(logits)).scatter(1, numbers, probabilities)
        return probabilities[0] / probabilities.sum()

    def draw(self, weights: Tensor) -> int:
        """A token with probabilities in proportion to weights (V,)."""
        sums = weights.cumsum(0)
        place = int(torch.searchsorted(sums, sums[-1] * self.random.random(), right=True))
        return min(place, int(weights.nonzero()[-1]))


class Draft:
    """Guesses of a smaller model, which chooses tokens by the same settings as the larger one."""

    def __init__(
        self, model: Model, decoding: Decoding, prompt: int, columns: int, source: Sequence[int],
        route: int | None = None,
    ) -> None:  # fmt: skip
        self.reading = DraftedText(model, columns, source, route)
        self.chooser = Chooser(decoding, prompt, (), self.reading.device)
        # Guesses need other random numbers than their checks, because the two must be independent.
        self.chooser.random = random.Random(None if decoding.seed is None else f"draft {decoding.seed}")
        self._ids: list[int] = []

    def guess(self, ids: list[int], count: int) -> Guesses:
        """See `Guess`."""
        same = 0
        while same < min(len(self._ids), len(ids) - 1) and self._ids[same] == ids[same]:
            same += 1
        self.reading.read_count = same
        self._ids = list(ids)
        tokens: list[int] = []
        drawn_with: list[Tensor] = []
        unread = ids[same:]
        for _ in range(count):
            logits = self.chooser.changed(self.reading.read(unread)[-1], self._ids)
            if self.chooser.decoding.draws:
                drawn_with.append(self.chooser.shares(logits))
                tokens.append(self.chooser.draw(drawn_with[-1]))
            else:
                tokens.append(int(largest(logits[None])))
            unread = tokens[-1:]
            self._ids.append(tokens[-1])
        self._ids.pop()  # the last guess has not been read
        return Guesses(tokens, drawn_with or None)


@torch.no_grad()
def speculate(
    model: Model, ids: Sequence[int], decoding: Decoding, guess: Guess, *, ends: Sequence[int],
    source: Sequence[int] = (), route: int | None = None,
) -> list[int]:  # fmt: skip
    """New tokens after the decoder's `ids`, without the token that ends the text. `source` is an encoder–decoder's,
    `route` the label of the text, if labels choose experts."""
    text = list(ids)
    reading = DraftedText(model, len(text) + decoding.max_tokens + decoding.speculate + 1, source, route)
    chooser = Chooser(decoding, len(text), ends, reading.device)
    stops = () if decoding.ignore_end else tuple(ends)
    while len(text) < len(ids) + decoding.max_tokens:
        room = len(ids) + decoding.max_tokens - len(text)
        guesses = guess(text, min(decoding.speculate, room - 1))
        unread = [*text[reading.read_count :], *guesses.tokens]
        logits = reading.read(unread)[len(unread) - len(guesses.tokens) - 1 :]
        for token in _check_guesses(chooser, logits, text, guesses):
            if token in stops:
                return text[len(ids) :]
            text.append(token)
        # The newest token has not been read; rejected guesses will be overwritten.
        reading.read_count = len(text) - 1
    return text[len(ids) :]


def _check_guesses(chooser: Chooser, logits: Tensor, text: list[int], guesses: Guesses) -> list[int]:
    """The accepted guesses, and one more token. Logits (N + 1, V) follow the text and each guess."""
    so_far, tokens = list(text), list[int]()
    for place, guess in enumerate([*guesses.tokens, None]):
        adjusted = chooser.changed(logits[place], so_far)
        if not chooser.decoding.draws:
            token = int(largest(adjusted[None]))
        else:
            guess_shares = None if guesses.shares is None or guess is None else guesses.shares[place]
            token = _accept_or_draw(chooser, adjusted, guess, guess_shares)
        tokens.append(token)
        so_far.append(token)
        if token != guess:
            break
    return tokens


def _accept_or_draw(chooser: Chooser, logits: Tensor, guess: int | None, drafted: Tensor | None) -> int:
    """The guess with probability min(1, p / q), else a token drawn by max(0, p − q): p are the model's probabilities, q
    the draft's, `drafted` (V,); None: the guess was not drawn."""
    shares = chooser.shares(logits)
    if guess is None:
        return chooser.draw(shares)
    if drafted is None:
        drafted = torch.zeros_like(shares)
        drafted[guess] = 1.0
    if chooser.random.random() * float(drafted[guess]) < float(shares[guess]):
        return guess
    return chooser.draw((shares - drafted).clamp(min=0.0))
