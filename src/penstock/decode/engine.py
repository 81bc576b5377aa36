"""Continuous batching: texts come and go while others are generated (Yu et al., OSDI 2022, "Orca", section 3).

An engine has a fixed number of slots, each with room for one text in the cache. In each step it reads pieces of new
prompts and makes one token for every text whose prompt has been read. Which request gets a slot when is for the
caller to decide. Which others run beside a text changes none of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.decode.blocks import Blocks, Table
from penstock.decode.choose import NOTHING, adjusted, chosen
from penstock.decode.past import Columns, Pages, Past
from penstock.decode.static import Compiled, bucket
from penstock.errors import ConfigError
from penstock.models.model import Model

CacheKind = Literal["slots", "paged"]
Finished = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A text to be generated."""

    ids: tuple[int, ...]
    """Token numbers of the prompt, or of the source that an encoder–decoder translates."""
    decoding: Decoding = field(default_factory=Decoding)

    @property
    def max_tokens(self) -> int:
        """Most new tokens."""
        return self.decoding.max_tokens


class Made(NamedTuple):
    """The result of a step for one slot."""

    slot: int
    tokens: tuple[int, ...]
    """New tokens; the one that ends a text is left out."""
    finished: Finished
    """Empty while the text goes on; `stop` at the model's end of text, `length` after as many tokens as asked for."""


@dataclass(slots=True)
class _Text:
    """A text in a slot."""

    request: Request
    ids: list[int]
    """All tokens, of the decoder."""
    prompt: int
    """How many of them are no new ones."""
    kept: int
    """How many have their keys and values in the cache."""
    table: Table | None
    random: random.Random
    source: bool = False
    """Whether its source has still to be encoded."""
    done: bool = False

    @property
    def made(self) -> int:
        return len(self.ids) - self.prompt


class Engine:
    """Slots of one model. Use it from one thread; `admit`, `step` and `release` never wait for each other."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        context: int | None = None,
        cache: CacheKind = "slots",
        tokens: int | None = None,
        block: int = 16,
        chunk: int = 512,
        start: int | None = None,
        ends: Sequence[int] = (),
        compiled: Compiled | None = None,
    ) -> None:
        """`context` are the most tokens of one text, prompt and new ones; none: as many as the model has positions.
        With `cache=paged` all texts together have room for `tokens` (none: every slot's `context`) in blocks of `block`
        tokens, and prompts that begin alike share them. A step reads at most `chunk` tokens of prompts. `start` is what
        an encoder–decoder's decoder begins with, `ends` are the tokens that end a text. `compiled` makes the tokens of
        all slots at once, with `cache=slots`.

        Raises ConfigError for a model that does not generate.
        """
        if not isinstance(model, Model) or model.graph.writer is None:
            raise ConfigError(
                f"A {type(model).__name__} does not generate text; give a decoder or an encoder–decoder."
            )
        if compiled is not None and cache != "slots":
            raise ConfigError("A compiled step needs columns that lie together; use cache=slots.")
        self._compiled = compiled
        self.model = model.eval()
        graph = model.graph
        most = graph.written[-1].most
        self.context: int = min(context or most, most)
        self.slots, self.chunk, self.start, self.ends = slots, chunk, start, tuple(ends)
        self.device = next(model.parameters()).device
        self._source = graph.remembered[0].most if graph.remembered else 0
        if self._source and start is None:
            raise ConfigError(
                "An encoder–decoder needs the number of the token that its decoder begins with: start."
            )
        self._texts: list[_Text | None] = [None] * slots
        self._blocks: Blocks | None = None
        store: Columns | Pages
        if cache == "paged":
            count = -(-(tokens or slots * self.context) // block)
            self._blocks = Blocks(count, block)
            store = Pages(count + 1, block)  # the last block takes what slots without a text write
        else:
            store = Columns(slots, self.context)
        self._past = Past(store, rows=slots, columns=self.context, memory=self._source, device=self.device)
        self._lengths = torch.ones(slots, dtype=torch.int64, device=self.device)
        self._ends = torch.tensor(self.ends, device=self.device) if self.ends else None

    def open(self, requests: Iterable[Request]) -> list[int | None]:
        """Admit requests in their order: the slot of each, None for those that have to wait."""
        return [self.admit(request) for request in requests]

    def admit(self, request: Request) -> int | None:
        """Give a request a slot; nothing is computed yet. None where slots or blocks are short.

        Raises ConfigError for a request that could never run.
        """
        self.require(request)
        free = [slot for slot, text in enumerate(self._texts) if text is None]
        if not free:
            return None
        ids = [self.start] if self._source and self.start is not None else list(request.ids)
        table = None
        if self._blocks is not None:
            shareable = () if self._source else ids
            table = self._blocks.allocate(shareable, len(ids) + request.max_tokens)
            if table is None:
                return None
        kept = 0 if table is None else table.shared
        seed = request.decoding.seed
        drawn = random.Random(seed) if seed is not None else random.Random()
        self._texts[free[0]] = _Text(request, ids, len(ids), kept, table, drawn, source=bool(self._source))
        return free[0]

    def require(self, request: Request) -> None:
        """Raise ConfigError, with all reasons, if a request could never run."""
        decoding, problems = request.decoding, []
        prompt = 1 if self._source else len(request.ids)
        if not request.ids:
            problems.append("The prompt has no tokens; give at least one.")
        if self._source and len(request.ids) > self._source:
            problems.append(
                f"The source has {len(request.ids):,} tokens, but the model reads {self._source:,}."
            )
        if not request.max_tokens:
            problems.append("Say with max_tokens how many tokens to generate at most.")
        if prompt + request.max_tokens > self.context:
            problems.append(
                f"The prompt has {prompt:,} tokens and {request.max_tokens:,} are to be generated, but a text may have "
                f"{self.context:,} in all; shorten the prompt, or lower max_tokens."
            )
        if self._blocks is not None and self._blocks.needed(prompt + request.max_tokens) > self._blocks.count:
            problems.append("The text needs more blocks than the cache has; enlarge it, or lower max_tokens.")
        size: int = self.model.config.vocabulary
        if request.ids and not (min(request.ids) >= 0 and max(request.ids) < size):
            problems.append(f"A token of the prompt lies outside of the vocabulary of {size:,}.")
        if any(number >= size for number, _ in decoding.biases):
            problems.append(f"decoding.bias names a token outside of the vocabulary of {size:,}.")
        if decoding.beams > 1 or decoding.contrastive or decoding.best > 1:
            problems.append(
                "Slots generate one text each, greedily or drawn; leave beams, best and contrastive out."
            )
        if problems:
            raise ConfigError(problems)

    def release(self, slot: int) -> None:
        """Free a slot, whether its text has finished or not."""
        text = self._texts[slot]
        if text is not None and text.table is not None and self._blocks is not None:
            self._blocks.release(text.table)
        self._texts[slot] = None

    @property
    def running(self) -> int:
        """Slots with a text."""
        return sum(text is not None for text in self._texts)

    @property
    def free(self) -> int:
        """Tokens for which new texts find room in the cache, in whole blocks; of `slots`, those of free ones."""
        if self._blocks is not None:
            return self._blocks.available * self._blocks.size
        return (self.slots - self.running) * self.context

    @torch.inference_mode()
    def step(self, chunk: int | None = None) -> list[Made]:
        """Read at most `chunk` tokens of prompts, and make a token for each text whose prompt has been read."""
        made = []
        left = chunk or self.chunk
        ready = [
            slot for slot, text in enumerate(self._texts) if text and not text.done and not self._unread(text)
        ]
        for slot, text in enumerate(self._texts):
            if text is not None and self._unread(text) and left > 0:
                count = min(left, len(text.ids) - text.kept)
                left -= count
                logits = self._read(slot, text, count)
                if logits is not None:
                    made += self._choose([slot], logits)
        if ready:
            made += self._choose(ready, self._decode(ready))
        return made

    def warm(self) -> None:
        """Make a text that nobody asked for, so that what is compiled is compiled before the first request."""
        slot = self.admit(Request(ids=(0,), decoding=Decoding(max_tokens=2, ignore_end=True)))
        assert slot is not None
        while not any(each.finished for each in self.step()):
            pass
        self.release(slot)

    @staticmethod
    def _unread(text: _Text) -> bool:
        return text.kept < text.prompt

    def _read(self, slot: int, text: _Text, count: int) -> Tensor | None:
        """Compute the next tokens of a prompt; logits (1, V) once its last one is among them."""
        begin, end = text.kept, text.kept + count
        tokens = torch.tensor([text.ids[begin:end]], device=self.device)
        source = lengths = None
        if text.source:
            source = torch.tensor([text.request.ids], device=self.device)
            self._lengths[slot] = source.shape[1]
            self._past.remember(self._lengths, self._source)
            text.source = False
        places = torch.arange(begin, end, device=self.device)
        self._look([text])
        self._past.at(
            places, columns=begin, width=end, rows=slice(slot, slot + 1), first=begin == 0, alone=count == 1
        )
        last = torch.tensor([count - 1], device=self.device)
        logits = self._run(tokens, last, source, lengths)
        text.kept = end
        if self._blocks is not None and text.table is not None:
            self._blocks.computed(text.table, end)
        return None if end < text.prompt else logits

    def _decode(self, ready: list[int]) -> Tensor:
        """Logits (r, V) after the newest token of each of these slots."""
        low, high = (ready[0], ready[-1] + 1) if self._compiled is None else (0, self.slots)
        texts = [self._texts[slot] if slot in ready else None for slot in range(low, high)]
        tokens = torch.tensor([[text.ids[-1] if text else 0] for text in texts], device=self.device)
        places = torch.tensor([[text.kept if text else 0] for text in texts], device=self.device)
        # A slot between them that is empty, or reads its prompt, writes where nothing is read before it is written.
        spare = [self._texts[slot] for slot in range(low, high)]
        columns = torch.tensor([[text.kept if text else 0] for text in spare], device=self.device)
        columns = columns.clamp(max=self.context - 1)
        width = int(columns.max()) + 1
        wanted = torch.tensor([slot - low for slot in ready], device=self.device)
        if self._compiled is not None:
            assert isinstance(self._past.store, Columns)
            width, there = bucket(width), self._past.store.width
            width = width if width <= there // 2 else max(width, bucket(there))  # a long text that has gone
            logits = self._compiled(self._past, tokens, places, columns, width)[wanted]
        else:
            self._look(texts)
            even = len(ready) == high - low and bool((places == places[0]).all())
            self._past.at(places, columns=columns, width=width, rows=slice(low, high), alone=even)
            logits = self._run(tokens, wanted)
        for text in texts:
            if text is not None:
                text.kept += 1
        return logits

    def _run(
        self, tokens: Tensor, rows: Tensor, source: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        if self._source:
            return self.model.logits(source, tokens, lengths, None, rows, past=self._past)
        return self.model.logits(tokens, None, None, rows, past=self._past)

    def _look(self, texts: Sequence[_Text | None]) -> None:
        """Tell a paged cache the blocks of these texts; what has no text writes to the spare block."""
        if self._blocks is None or not isinstance(self._past.store, Pages):
            return
        longest = max(len(text.table.blocks) if text and text.table else 1 for text in texts)
        spare = self._blocks.count
        rows = [text.table.blocks if text and text.table else [] for text in texts]
        table = [[*row, *[spare] * (longest - len(row))] for row in rows]
        self._past.store.look(torch.tensor(table, device=self.device))

    def _choose(self, slots: list[int], logits: Tensor) -> list[Made]:
        """The next token of each of these slots, whose texts are alike in settings or not."""
        made = []
        groups: dict[Decoding, list[int]] = {}
        for place, slot in enumerate(slots):
            groups.setdefault(self._text(slot).request.decoding, []).append(place)
        for decoding, places in groups.items():
            texts = [self._text(slots[place]) for place in places]
            own = logits.float() if len(places) == len(slots) else logits[places].float()
            history = None
            if decoding.looks_back:
                longest = max(len(text.ids) for text in texts)
                padded = [[NOTHING] * (longest - len(text.ids)) + text.ids for text in texts]
                history = torch.tensor(padded, device=self.device)
            new = torch.tensor([[text.made] for text in texts], device=self.device)
            ends = None if decoding.ignore_end else self._ends
            own = adjusted(own, decoding, history, new, ends)
            uniform = None
            if decoding.draws:
                uniform = torch.tensor([text.random.random() for text in texts], device=self.device)
            for place, token in zip(places, chosen(own, decoding, uniform).tolist(), strict=True):
                made.append(self._add(slots[place], token))
        return made

    def _text(self, slot: int) -> _Text:
        text = self._texts[slot]
        assert text is not None
        return text

    def _add(self, slot: int, token: int) -> Made:
        text = self._text(slot)
        if token in self.ends and not text.request.decoding.ignore_end:
            text.done = True
            return Made(slot, (), "stop")
        text.ids.append(token)
        text.done = text.made >= text.request.max_tokens
        return Made(slot, (token,), "length" if text.done else "")
