"""One text of an answer as it is made, and its forms in OpenAI's routes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.data.text.tokenizers import Tokenizer
from penstock.infer.text import Stream
from penstock.serve.backend import Lost, Ticket
from penstock.serve.metrics import Metrics
from penstock.serve.parse import TextRequest

Piece = tuple[str, tuple[int, ...]]
"""One part of a stream: complete text, and the tokens that came since the part before."""


class Text:
    """One text as it is made."""

    def __init__(
        self, tokenizer: Tokenizer | None, metrics: Metrics, ticket: Ticket, wanted: TextRequest
    ) -> None:
        self._tokenizer, self._metrics, self._ticket, self._stop = tokenizer, metrics, ticket, wanted.stop
        self._every = wanted.token_ids or tokenizer is None
        self.ids: list[int] = []
        self.text = ""
        self.finished = ""
        self._begun = time.monotonic()

    async def run(self, tell: Callable[[Piece], None] | None = None) -> None:
        """Take tokens until the last, and tell each piece of text as soon as it is sure, or where token numbers are
        wanted every token as soon as it comes. Raises as `Ticket.events`."""
        words, metrics, sent = self._words(), self._metrics, False
        first = last = 0.0
        async with contextlib.aclosing(self._ticket.events()) as events:
            async for event in events:
                if event.again:
                    if sent:
                        raise Lost("The worker died while it made this text, and has been started again.")
                    words, self.ids = self._words(), []
                    continue
                last = time.monotonic()
                if not first:
                    first = last
                    metrics.prompt_tokens += len(self._ticket.message["ids"])
                self.ids.extend(event.tokens)
                metrics.generated_tokens += len(event.tokens)
                piece = words.add(event.tokens) if event.tokens and words is not None else ""
                if event.finished and words is not None:
                    piece += words.end()
                if tell is not None and (piece or (self._every and event.tokens)):
                    tell((piece, event.tokens if self._every else ()))
                    sent = True
                if words is not None and words.stopped:
                    self.finished = "stop"
                    break
                self.finished = event.finished
        self.text = words.text if words is not None else ""
        metrics.first_token.add(first - self._begun)
        metrics.latency.add(last - self._begun)
        if len(self.ids) > 1:
            metrics.per_token.add((last - first) / (len(self.ids) - 1))

    def _words(self) -> Stream | None:
        return None if self._tokenizer is None else Stream(self._tokenizer, self._stop)


@dataclass(slots=True)
class Whole:
    """One text with its prompt."""

    prompt: list[int]
    ids: list[int]
    text: str
    finished: str
    scores: list[Any] | None = None
    """Scores of prompt and text together, as `penstock.infer.score.TextScores`."""

    @property
    def mean(self) -> float:
        """Mean log-probability of the text's own tokens."""
        logs = self.scores[0][len(self.prompt) - 1 :] if self.scores and self.ids else [0.0]
        return sum(logs) / len(logs)


def likeliest(texts: Sequence[Whole], wanted: TextRequest) -> list[Whole]:
    """The `choices` likeliest of each prompt's texts, in the order in which they were made."""
    if wanted.best_of == wanted.choices or wanted.most == 0:
        return list(texts)
    chosen: list[Whole] = []
    for start in range(0, len(texts), wanted.best_of):
        group = texts[start : start + wanted.best_of]
        best = sorted(range(len(group)), key=lambda n: -group[n].mean)[: wanted.choices]
        chosen += [group[n] for n in sorted(best)]
    return chosen


def usage(prompts: Sequence[list[int]], texts: Sequence[Text]) -> dict[str, int]:
    """How many tokens were read and made."""
    read, made = sum(map(len, prompts)), sum(len(text.ids) for text in texts)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def choice(
    place: int, whole: Whole, kind: str, wanted: TextRequest, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """A whole text; behind its prompt, and with log-probabilities, where these are wanted."""
    shown = wanted.echo or wanted.logprobs is not None
    prompt = tokenizer.decode(whole.prompt) if shown and tokenizer is not None else ""
    logs = None
    if wanted.logprobs is not None and whole.scores is not None:
        logs = _logs(whole, prompt, chats=kind.startswith("chat"), echo=wanted.echo, tokenizer=tokenizer)
    shared = {"index": place, "finish_reason": whole.finished, "logprobs": logs}
    if kind.startswith("chat"):
        return shared | {"message": {"role": "assistant", "content": whole.text}}
    text, ids = (prompt + whole.text, [*whole.prompt, *whole.ids]) if wanted.echo else (whole.text, whole.ids)
    return shared | {"text": text, "token_ids": ids}


def _logs(
    whole: Whole, prompt: str, *, chats: bool, echo: bool, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Log-probabilities in the form of the route. Nothing comes before a first token, so that it has none."""
    assert whole.scores is not None

    def word(number: int) -> str:
        return str(number) if tokenizer is None else tokenizer.decode([number])

    ids = [*whole.prompt, *whole.ids]
    logs, tops = [None, *whole.scores[0]], [[], *whole.scores[1]]
    first = 0 if echo else len(whole.prompt)
    if chats:

        def entry(number: int, log: float) -> dict[str, Any]:
            text = word(number)
            return {"token": text, "logprob": log, "bytes": list(text.encode())}

        content = [
            entry(ids[at], logs[at] or 0.0) | {"top_logprobs": [entry(n, log) for n, log in tops[at]]}
            for at in range(first, len(ids))
        ]
        return {"content": content}
    words = [word(number) for number in ids[first:]]
    begin = 0 if echo else len(prompt)
    best: list[dict[str, float] | None] = []
    for at in range(first, len(ids)):
        row: dict[str, float] = {}
        for number, log in tops[at]:  # two tokens may be spelled alike, of which the likelier comes first
            row.setdefault(word(number), log)
        best.append(row if at else None)
    return {
        "tokens": words, "token_logprobs": logs[first:], "top_logprobs": best,
        "text_offset": [begin, *(begin + end for end in itertools.accumulate(map(len, words)))][: len(words)],
    }  # fmt: skip


def base64_of(vector: Sequence[float]) -> str:
    """A vector's elements as fp32, little-endian, in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def delta(place: int, more: dict[str, str], finished: str | None) -> dict[str, Any]:
    """A part of a message."""
    return {"index": place, "delta": more, "finish_reason": finished}


def piece(place: int, part: Piece, kind: str) -> dict[str, Any]:
    """A part of a text."""
    text, ids = part
    if kind.startswith("chat"):
        return delta(place, {"content": text}, None)
    entry = {"index": place, "text": text, "finish_reason": None}
    return entry | {"token_ids": ids} if ids else entry


def end(place: int, finished: str, kind: str) -> dict[str, Any]:
    """The part that follows the last text and says why it ended."""
    return delta(place, {}, finished) if kind.startswith("chat") else {
        "index": place, "text": "", "finish_reason": finished
    }  # fmt: skip


def line(data: dict[str, Any]) -> str:
    """A line of a stream, and the empty one behind it."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
