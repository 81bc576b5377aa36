"""One text of an answer during generation, and its forms in OpenAI's routes."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.data.text.tokenizers import Tokenizer
from penstock.infer.text import Spelling, Stream
from penstock.serve.backend import Lost, Ticket
from penstock.serve.metrics import Metrics
from penstock.serve.parse import TextRequest

Piece = tuple[str, tuple[int, ...]]
"""One part of a stream: complete text, and the tokens since the previous part."""


class Text:
    """One text of an answer: its prompt, and the tokens that are generated."""

    def __init__(
        self, tokenizer: Tokenizer | None, metrics: Metrics, wanted: TextRequest, prompt: list[int],
        ticket: Ticket | None = None, *, source: bool,
    ) -> None:  # fmt: skip
        """`ticket` is None if nothing is generated. `source` says that the prompt is a source to translate, not a text
        to continue."""
        self._tokenizer, self._metrics, self._ticket, self._stop = tokenizer, metrics, ticket, wanted.stop
        self._every = wanted.token_ids or tokenizer is None
        self._after: Sequence[int] = () if source else prompt
        self.prompt = prompt
        self.ids: list[int] = []
        self.end: int | None = None
        """The token that ended the text, which is not part of it."""
        self.text = ""
        self.finished = "length"
        self.scores: list[Any] | None = None
        """Scores of `tokens`, in the form of `penstock.infer.score.TextScores`."""
        self._begun = time.monotonic()

    @property
    def tokens(self) -> list[int]:
        """All tokens: the prompt's, the text's, and the one that ended it."""
        return [*self.prompt, *self.ids, *(() if self.end is None else (self.end,))]

    @property
    def mean(self) -> float:
        """Mean log-probability of the tokens that were generated."""
        logs = self.scores[0][len(self.prompt) - 1 :] if self.scores else []
        return sum(logs) / len(logs) if logs else 0.0

    async def run(self, tell: Callable[[Piece], None] | None = None) -> None:
        """Receive all tokens. Pass each piece of text to `tell` as soon as it is final, or, if token numbers are
        wanted, each token at once. Raises the errors of `Ticket.events`."""
        if self._ticket is None:
            return
        words, metrics, sent = self._words(), self._metrics, False
        first = last = 0.0
        async with contextlib.aclosing(self._ticket.events()) as events:
            async for event in events:
                if event.again:
                    if sent:
                        raise Lost("The worker died while it generated this text, and has been restarted.")
                    words, self.ids = self._words(), []
                    continue
                last = time.monotonic()
                if not first:
                    first = last
                    metrics.prompt_tokens += len(self.prompt)
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
                self.finished, self.end = event.finished, event.end
        self.text = words.text if words is not None else ""
        metrics.first_token.add(first - self._begun)
        metrics.latency.add(last - self._begun)
        if len(self.ids) > 1:
            metrics.per_token.add((last - first) / (len(self.ids) - 1))

    def cancel(self) -> None:
        """End the generation, if it has not ended."""
        if self._ticket is not None:
            self._ticket.cancel()

    def _words(self) -> Stream | None:
        return None if self._tokenizer is None else Stream(self._tokenizer, self._stop, self._after)


def likeliest(texts: Sequence[Text], wanted: TextRequest) -> list[Text]:
    """The `choices` likeliest of each prompt's texts, in the order of generation."""
    if wanted.best_of == wanted.choices or wanted.max_tokens == 0:
        return list(texts)
    chosen: list[Text] = []
    for start in range(0, len(texts), wanted.best_of):
        group = texts[start : start + wanted.best_of]
        best = sorted(range(len(group)), key=lambda n: -group[n].mean)[: wanted.choices]
        chosen += [group[n] for n in sorted(best)]
    return chosen


def usage(prompts: Sequence[list[int]], texts: Sequence[Text]) -> dict[str, int]:
    """The numbers of tokens that were read and generated."""
    read, generated = sum(map(len, prompts)), sum(len(text.ids) for text in texts)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def choice(
    place: int, text: Text, kind: str, wanted: TextRequest, spelling: Spelling | None
) -> dict[str, Any]:
    """The entry for a complete text; if requested, after its prompt, and with log-probabilities."""
    logs = None
    if wanted.logprobs is not None and text.scores is not None:
        logs = _chat_logs(text, spelling) if kind.startswith("chat") else _logs(text, wanted.echo, spelling)
    shared = {"index": place, "finish_reason": text.finished, "logprobs": logs}
    if kind.startswith("chat"):
        return shared | {"message": {"role": "assistant", "content": text.text}}
    if not wanted.echo:
        return shared | {"text": text.text, "token_ids": text.ids}
    prompt = "" if spelling is None else spelling.decode(text.prompt)
    return shared | {"text": prompt + text.text, "token_ids": [*text.prompt, *text.ids]}


def _shown(number: int, spelling: Spelling | None) -> tuple[str, bytes]:
    return (str(number), str(number).encode()) if spelling is None else spelling(number)


def _chat_logs(text: Text, spelling: Spelling | None) -> dict[str, Any]:
    """Log-probabilities of the generated tokens, in the form of chats."""
    assert text.scores is not None

    def entry(number: int, log: float) -> dict[str, Any]:
        token, raw = _shown(number, spelling)
        return {"token": token, "logprob": log, "bytes": list(raw)}

    first, tokens = len(text.prompt), text.tokens
    rows = zip(tokens[first:], *(scores[first - 1 :] for scores in text.scores))
    content = [entry(n, log) | {"top_logprobs": [entry(*pair) for pair in tops]} for n, log, tops in rows]
    return {"content": content}


def _logs(text: Text, echo: bool, spelling: Spelling | None) -> dict[str, Any]:
    """Log-probabilities in the form of completions. The first token has none, because nothing precedes it."""
    assert text.scores is not None
    tokens, first = text.tokens, 0 if echo else len(text.prompt)
    logs, tops = [None, *text.scores[0]], [None, *text.scores[1]]
    best: list[dict[str, float] | None] = []
    for row in tops[first:]:
        names: dict[str, float] = {}
        for number, log in row or ():  # if two tokens have the same spelling, the likelier comes first
            names.setdefault(_shown(number, spelling)[0], log)
        best.append(None if row is None else names)
    return {
        "tokens": [_shown(number, spelling)[0] for number in tokens[first:]],
        "token_logprobs": logs[first:], "top_logprobs": best,
        "text_offset": [0] * len(best) if spelling is None else spelling.offsets(tokens, first),
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
    """A line of an event stream, followed by an empty line."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
