"""Incremental decoding of tokens: pieces of whole characters, and stop texts that end generation."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.data.text.tokenizers import Tokenizer, letters_of_bytes
from penstock.errors import ConfigError

_BROKEN = "\ufffd"
_CONTEXT = 16
"""Tokens that are decoded again together with the next token, whose text may depend on them."""


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a model that is given a text. Raises ConfigError if the model came without one."""
    if tokenizer is None:
        raise ConfigError("A text needs a tokenizer, and this model came without one; give token numbers.")
    return tokenizer


def prompt_numbers(prompt: str | Sequence[int], tokenizer: Tokenizer | None, *, source: bool) -> list[int]:
    """Token numbers of a prompt, with the tokenizer's opening tokens and, for a `source`, with its end token. Raises
    ConfigError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return list(prompt)
    words = needed(tokenizer)
    ids = [*words.opening(), *words.encode([prompt])[0].tolist()]
    return [*ids, words.end] if source and words.end is not None else ids


class Stream:
    """Decodes one sequence incrementally. A character is returned only once all its bytes have arrived, and nothing is
    returned that may still become the beginning of a stop text.

    The text is what the tokens add to the text of the prompt `after`: decoded separately, the first word of a
    continuation would lose its space with SentencePiece tokenizers, such as Llama 2's."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = list(after)
        count, self._read = _CONTEXT, len(after)
        while count < len(after) and not _stands_alone(tokenizer.decode(after[-count:])):
            count *= 2
        self._from = max(0, len(after) - count)
        self._held = ""
        self.text = ""
        """All text that has been returned."""
        self.stopped = False
        """Whether a stop text was found; no text is returned after it."""

    def add(self, tokens: Sequence[int]) -> str:
        """Add the next tokens; return the text that is complete now."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        whole, more = self._decoded()
        if whole.endswith(_BROKEN) or not more:
            return ""
        self._from, self._read = max(self._from, len(self._tokens) - _CONTEXT), len(self._tokens)
        if self._from:
            # A character that begins before the context would be decoded again, and wrongly.
            tail = self._tokenizer.decode(self._tokens[self._from :])
            if not _stands_alone(tail) or not whole.endswith(tail):
                self._from = 0
        return self._release(more)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        more = self._release(self._decoded()[1])
        self._read = len(self._tokens)
        left, self._held = self._held, ""
        self.text += left
        return more + left

    def _decoded(self) -> tuple[str, str]:
        """The text of the tokens from the context on, and its new part."""
        before = self._tokenizer.decode(self._tokens[self._from : self._read])
        whole = self._tokenizer.decode(self._tokens[self._from :])
        if not whole.startswith(before):  # the prompt ended within a character, which is complete now
            before = before.rstrip(_BROKEN)
        return whole, whole[len(before) :]

    def _release(self, more: str) -> str:
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
        """Number of characters at the end of the held text that may begin a stop text."""
        return next(
            (n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0
        )


class Spelling:
    """Single tokens as OpenAI's API shows them, and where each begins in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._words = tokenizer, tokenizer.words()
        self._before = tokenizer.encode(["a"])[0].tolist()
        """A prefix, because a token keeps its leading space only after another token."""
        self._length = len(tokenizer.decode(self._before))
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, number: int) -> tuple[str, bytes]:
        """A token as text, and its own bytes. A special token is shown by its name, and a part of a character as
        `bytes:\\xe2\\x82`."""
        if number not in self._known:
            word = self._words[number] if number < len(self._words) else str(number)
            text = self.decode([*self._before, number])[self._length :] or word
            raw = _bytes_of(word) if _BROKEN in text else None
            if raw is None:
                raw = text.encode("utf-8", "replace")
            else:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._known[number] = text, raw
        return self._known[number]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode(numbers)

    def offsets(self, numbers: Sequence[int], first: int) -> list[int]:
        """Where the tokens from `first` on begin in the text; a token that continues a character has that character's
        place."""
        text, places = Stream(self._tokenizer, (), numbers[:first]), list[int]()
        begin = len(self.decode(numbers[:first]))
        for number in numbers[first:]:
            places.append(begin + len(text.text))
            text.add([number])
        return places


def _bytes_of(word: str) -> bytes | None:
    """The bytes that a token's name stands for, in tokenizers that split characters; None for other names."""
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", word):
        return bytes.fromhex(byte[1])
    letters = {letter: byte for byte, letter in letters_of_bytes().items()}
    return bytes(letters[letter] for letter in word) if all(letter in letters for letter in word) else None


def _stands_alone(text: str) -> bool:
    """Whether decoding can start at these tokens: their text is not blank, and its first character is complete."""
    return bool(text.strip()) and not text.startswith(_BROKEN)
