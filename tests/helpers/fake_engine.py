"""An engine without a model, in the shape of `penstock.decode.engine.Engine`: each token is one more than the last one.

`seconds` of a step, and a prompt that begins with `POISON`, which ends the process, are for tests of the server. The
model would end a prompt whose last token is `END` − 1.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from penstock.config.decoding import Decoding
from penstock.errors import ConfigError
from penstock.serve.worker import Opened

CONTEXT = 512
POISON, END = 255, 253
VOCABULARY = 200


@dataclass
class Asked:
    """What `penstock.decode.engine.Request` is, without torch."""

    ids: tuple[int, ...]
    decoding: Decoding
    route: int | None = None

    @property
    def max_tokens(self) -> int:
        return self.decoding.max_tokens


class Fake:
    """Counts on from the last token of the prompt."""

    def __init__(self, slots: int, seconds: float) -> None:
        self.seconds = seconds
        self.texts: list[list[int] | None] = [None] * slots  # last token, tokens left

    def require(self, request: Any) -> None:
        if len(request.ids) + request.max_tokens > CONTEXT:
            raise ConfigError(f"The prompt has {len(request.ids)} tokens, too many.")

    def admit(self, request: Any) -> int | None:
        if request.ids[0] == POISON:
            os._exit(3)
        slot = self.texts.index(None)
        self.texts[slot] = [request.ids[-1], request.max_tokens]
        return slot

    def step(self, chunk: int | None = None) -> list[tuple[int, tuple[int, ...], str, int | None]]:
        time.sleep(self.seconds)
        made: list[tuple[int, tuple[int, ...], str, int | None]] = []
        for slot, text in enumerate(self.texts):
            if text is not None and text[1]:
                ends = text[0] + 1 == END
                text[0] = (text[0] + 1) % VOCABULARY
                text[1] -= 1
                if ends:
                    text[1] = 0
                    made.append((slot, (), "stop", END))
                else:
                    made.append((slot, (text[0],), "" if text[1] else "length", None))
        return made

    def release(self, slot: int) -> None:
        self.texts[slot] = None


def scores(ids: list[int], top: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Each token is as likely as its number says; the likeliest are the smallest."""
    return [-one / 100 for one in ids[1:]], [[(n, -n / 100) for n in range(97, 97 + top)] for _ in ids[1:]]


def opened(settings: dict[str, Any]) -> Opened:
    """The fake; the folder's name says how many milliseconds a step takes."""
    seconds = int(settings["model"].rpartition("-")[2]) / 1e3
    about = {"writes": True, "context": CONTEXT, "source": 0, "vocabulary": VOCABULARY}
    return Opened(Fake(settings["slots"], seconds), Asked, about, {"scores": scores})


def encoder_opened(settings: dict[str, Any]) -> Opened:
    """A fake encoder: the vector of a text is its number of tokens and a quarter of its first one."""
    about = {"writes": False, "context": CONTEXT, "source": 0, "vocabulary": VOCABULARY}
    return Opened(None, Asked, about, {"vectors": lambda rows: [[len(row), row[0] / 4] for row in rows]})
