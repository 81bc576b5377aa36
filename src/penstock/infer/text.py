"""Text of tokens that come one after the other: pieces that are whole, and texts before which generation ends."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.decoding import USUAL_TOKENS
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError

_BROKEN = "\ufffd"
_CONTEXT = 16
"""Tokens that are decoded again with the next one, because what a token reads as may depend on those before it."""


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a model that is given a text. Raises ConfigError where it came without one."""
    if tokenizer is None:
        raise ConfigError("A text needs a tokenizer, and this model came without one; give token numbers.")
    return tokenizer


def prompt_numbers(prompt: str | Sequence[int], tokenizer: Tokenizer | None, *, source: bool) -> list[int]:
    """Token numbers of a prompt with what the tokenizer puts before a text, and of a `source` with the token that ends
    it. Raises ConfigError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return list(prompt)
    words = needed(tokenizer)
    ids = [*words.opening(), *words.encode([prompt])[0].tolist()]
    return [*ids, words.end] if source and words.end is not None else ids


def usual_tokens(prompt: int, room: int, *, least: int = 0) -> int:
    """Most new tokens where nobody says, after `prompt` tokens of a text that may have `room`."""
    return max(1, min(max(USUAL_TOKENS, least), room - prompt))


class Stream:
    """The text of one sequence of tokens, told as it comes. No character is told before it is whole, and nothing that
    may still turn out to be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._from, self._read = 0, 0
        self._held = ""
        self.text = ""
        """All that has been told."""
        self.stopped = False
        """Whether a stop text has come; nothing is told after it."""

    def add(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; the text that can be told now."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        before = self._tokenizer.decode(self._tokens[self._from : self._read])
        whole = self._tokenizer.decode(self._tokens[self._from :])
        if whole.endswith(_BROKEN) or len(whole) <= len(before):
            return ""
        self._from, self._read = max(self._from, len(self._tokens) - _CONTEXT), len(self._tokens)
        if self._from:
            # A character that begins before the context would be read again, and wrongly.
            tail = self._tokenizer.decode(self._tokens[self._from :])
            if not whole.endswith(tail):
                self._from = 0
        return self._tell(whole[len(before) :])

    def end(self) -> str:
        """All that is left, when no token comes any more."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._from : self._read])
        whole = self._tokenizer.decode(self._tokens[self._from :])
        self._read = len(self._tokens)
        more = self._tell(whole[len(before) :])
        left, self._held = self._held, ""
        self.text += left
        return more + left

    def _tell(self, more: str) -> str:
        self._held += more
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            released, self._held, self.stopped = self._held[: min(places)], "", True
        else:
            keep = max((self._overlap(stop) for stop in self._stop), default=0)
            cut = len(self._held) - keep
            released, self._held = self._held[:cut], self._held[cut:]
        self.text += released
        return released

    def _overlap(self, stop: str) -> int:
        """Characters at the end of what is held that may begin a stop text."""
        return next(
            (n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0
        )


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """A text before the first of its stop texts, and whether there is one."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
