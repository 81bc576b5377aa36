"""Continuous batching: texts start and finish while others are generated (Yu et al., OSDI 2022, "Orca", section 3).

An engine has a fixed number of slots, each with space for one text in the cache. In each step it reads pieces of new
prompts and generates one token for every text whose prompt has been read. The caller decides which request gets a slot,
and when. A text's tokens do not depend on the other texts in the batch.

All tokens stay on the device, and `advance` never waits for it, so a caller that does not need each token at once, such
as `penstock.decode.sample`, lets a GPU work ahead.

Shapes: r texts in a pass, N tokens of each, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding, bucket
from penstock.decode.blocks import Blocks, BlockTable
from penstock.decode.choose import history_of, next_tokens
from penstock.decode.kv_cache import Columns, KVCache, Pages, run_pass
from penstock.decode.static import Compiled
from penstock.decode.texts import eagerly
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
    route: int | None = None
    """Label of the text, by which a `given` router chooses experts."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of new tokens."""
        return self.decoding.max_tokens


class SlotResult(NamedTuple):
    """The result of a step for one slot."""

    slot: int
    tokens: tuple[int, ...]
    """New tokens; the one that ends a text is left out."""
    finished: Finished
    """Empty while the text continues; `stop` at the model's end of text, `length` at the request's `max_tokens`."""
    end: int | None = None
    """The token that ended the text, with `stop`."""


@dataclass(slots=True, eq=False)
class _SlotText:
    """A text in a slot."""

    request: Request
    settings: Decoding
    """The request's settings without the seed: texts with equal settings choose their tokens together."""
    prompt: int
    """Number of the decoder's tokens that are not generated."""
    cached: int
    """Tokens whose keys and values are in the cache."""
    table: BlockTable | None
    source: bool = False
    """Whether its source still has to be encoded."""
    generated: int = 0
    done: bool = False

    @property
    def unread(self) -> bool:
        return self.cached < self.prompt


class _Batch(NamedTuple):
    """Texts that get their next token in the same pass."""

    slots: list[int]
    texts: list[_SlotText]
    every: bool
    """Whether the pass computes these slots only."""
    tokens: Tensor
    """(r, 1), their newest tokens; any token for other slots in between."""
    places: Tensor | None
    """(r, 1), the positions of these tokens; None if the pass computes these slots only and all positions are equal."""


class Engine:
    """Slots of one model. Use an engine from one thread; `admit`, `step` and `release` never wait for each other."""

    def __init__(
        self, model: Model, *, slots: int = 8, context: int | None = None, cache: CacheKind = "slots",
        tokens: int | None = None, block: int = 16, chunk: int = 512, start: int | None = None,
        ends: Sequence[int] = (), source: int | None = None, compiled: Compiled | None = None,
    ) -> None:  # fmt: skip
        """`context` is the maximum number of tokens of one text, prompt and new; None: one per position of the model.
        The last token of a text needs no position, because the model never reads it. `source` is the maximum number of
        tokens of a source. With `cache=paged` all texts together have space for `tokens` (None: every slot's `context`)
        in blocks of `block` tokens, and prompts with the same beginning share blocks. A step reads at most `chunk`
        tokens of prompts. `start` is the first token of an encoder–decoder's decoder, `ends` are the tokens that end a
        text. `compiled` is a compiled step for all slots, with `cache=slots`.

        Raises ConfigError for a model that does not generate.
        """
        if not isinstance(model, Model) or not model.graph.generates:
            raise ConfigError(
                "The model does not generate text; give a decoder, or an encoder–decoder with one source of tokens."
            )
        if compiled is not None and cache != "slots":
            raise ConfigError("A compiled step needs contiguous columns; use cache=slots.")
        self._compiled = compiled
        self.model = model.eval()
        graph = model.graph
        longest, most = graph.runs[0].max_tokens, graph.written[-1].max_tokens
        self.context: int = min(context or most, most + 1)
        self.slots, self.chunk, self.start, self.ends = slots, chunk, start, tuple(ends)
        self.device = next(model.parameters()).device
        self._source = min(source or longest, longest) if graph.remembered else 0
        if self._source and start is None:
            raise ConfigError(
                "An encoder–decoder needs the number of the token that its decoder begins with: start."
            )
        self._texts: list[_SlotText | None] = [None] * slots
        self._blocks: Blocks | None = None
        store: Columns | Pages
        if cache == "paged":
            count = -(-(tokens or slots * self.context) // block)
            self._blocks = Blocks(count, block)
            store = Pages(count + 1, block)  # slots without a text write to the last block
        else:
            store = Columns(slots, self.context)
        self._past = KVCache(store, rows=slots, columns=self.context, memory=self._source, device=self.device)
        self._lengths = torch.ones(slots, dtype=torch.int64, device=self.device)
        """(slots,), number of tokens of each source."""
        self._routes = torch.zeros_like(self._lengths) if model.graph.routed else None
        """(slots,), the label of each text."""
        self._ids = torch.zeros(slots, self.context, dtype=torch.int64, device=self.device)
        """All tokens of the texts, prompts and new tokens."""
        self._uniform: Tensor | None = None
        """(slots, context), random numbers in [0, 1) for drawing new tokens."""
        self._ends = torch.tensor(self.ends, device=self.device) if self.ends else None
        self._every = torch.arange(self.context, device=self.device)
        self._next: _Batch | None = None
        """The texts of the next step, if no text starts or finishes before it."""

    def admit(self, request: Request) -> int | None:
        """Give a request a slot; nothing is computed yet. None if no slot or too few blocks are free.

        Raises ConfigError for a request that could never run.
        """
        self.require(request)
        free = [slot for slot, text in enumerate(self._texts) if text is None]
        if not free:
            return None
        ids = [self.start] if self._source and self.start is not None else list(request.ids)
        table = None
        if self._blocks is not None:
            # Prompts with the same beginning but different experts have different keys.
            shareable = () if self._source or self._routes is not None else ids
            table = self._blocks.allocate(shareable, len(ids) + request.max_tokens)
            if table is None:
                return None
        decoding, slot, self._next = request.decoding, free[0], None
        self._ids[slot, : len(ids)] = torch.tensor(ids, device=self.device)
        if self._routes is not None and request.route is not None:
            self._routes[slot] = request.route
        if decoding.draws:
            if self._uniform is None:
                self._uniform = torch.zeros(self._ids.shape, device=self.device)
            rng = random.Random(decoding.seed) if decoding.seed is not None else random.Random()
            numbers = [rng.random() for _ in range(request.max_tokens)]
            self._uniform[slot, : len(numbers)] = torch.tensor(numbers, device=self.device)
        settings = decoding if decoding.seed is None else replace(decoding, seed=None)
        # Share one object among all texts with equal settings, because comparing settings in each step would be slow.
        settings = next(
            (text.settings for text in self._texts if text and text.settings == settings), settings
        )
        cached = 0 if table is None else table.reused
        self._texts[slot] = _SlotText(request, settings, len(ids), cached, table, source=bool(self._source))
        return slot

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
        if self._routes is not None and request.route is None:
            problems.append("The label of a text chooses this model's experts; give each request its route.")
        if not request.max_tokens:
            problems.append("Set max_tokens to the maximum number of tokens to generate.")
        if prompt + request.max_tokens > self.context:
            problems.append(
                f"The prompt has {prompt:,} tokens and {request.max_tokens:,} are to be generated, but a text may have "
                f"{self.context:,} in all; shorten the prompt, or lower max_tokens."
            )
        blocks, most = self._blocks, prompt + request.max_tokens
        if blocks is not None and blocks.count_for(most) > blocks.count:
            problems.append("The text needs more blocks than the cache has; enlarge it, or lower max_tokens.")
        size: int = self.model.config.vocabulary
        if request.ids and not (min(request.ids) >= 0 and max(request.ids) < size):
            problems.append(f"A token of the prompt is outside of the vocabulary of {size:,}.")
        if max(decoding.named_tokens, default=0) >= size:
            problems.append(f"decoding names a token outside of the vocabulary of {size:,}.")
        if decoding.beams > 1 or decoding.best > 1:
            problems.append("Slots generate one text each, greedily or drawn; leave beams and best out.")
        if problems:
            raise ConfigError(problems)

    def release(self, slot: int) -> None:
        """Free a slot, whether its text has finished or not."""
        text = self._texts[slot]
        if text is not None and text.table is not None and self._blocks is not None:
            self._blocks.release(text.table)
        self._texts[slot] = self._next = None

    @property
    def running(self) -> int:
        """Slots with a text."""
        return sum(text is not None for text in self._texts)

    @torch.inference_mode()
    def step(self, chunk: int | None = None) -> list[SlotResult]:
        """Read at most `chunk` tokens of prompts, and generate a token for each text whose prompt has been read."""
        return [
            self._result(slot, token)
            for slots, tokens in self.advance(chunk)
            for slot, token in zip(slots, tokens.tolist(), strict=True)
        ]

    def advance(self, chunk: int | None = None) -> list[tuple[list[int], Tensor]]:
        """Do a `step`, but return slots and their new tokens (r,), including tokens that end a text, on the device."""
        results = []
        batch, self._next = self._next, None
        steady = batch is not None
        if batch is None:
            batch = self._ready()
            for low, high, count in list(self._pieces(chunk or self.chunk)):
                logits, slots = self._read_prompts(low, high, count), list(range(low, high))
                if not self._text(low).unread:
                    results.append((slots, self._choose(slots, logits)))
            steady = not any(text and text.unread for text in self._texts) and not results
        if batch is not None:
            following = batch.places + 1 if batch.every and batch.places is not None else None
            tokens = self._choose(batch.slots, self._decode(batch), following)
            results.append((batch.slots, tokens))
            if steady and batch.every and not any(text.done for text in batch.texts):
                self._next = batch._replace(tokens=tokens[:, None], places=following)
        return results

    def _ready(self) -> _Batch | None:
        """All texts whose prompts have been read; None if there are none."""
        slots = [slot for slot, text in enumerate(self._texts) if text and not text.done and not text.unread]
        if not slots:
            return None
        texts = [self._text(slot) for slot in slots]
        low, high = self._span(slots)
        every = len(slots) == high - low
        if every and self._compiled is None and len({text.cached for text in texts}) == 1:
            return _Batch(slots, texts, every, self._ids[low:high, texts[0].cached, None], None)
        places = [0] * (high - low)
        for slot, text in zip(slots, texts, strict=True):
            places[slot - low] = text.cached
        columns = torch.tensor(places, device=self.device)[:, None]
        return _Batch(slots, texts, every, self._ids[low:high].gather(1, columns), columns)

    def _span(self, slots: list[int]) -> tuple[int, int]:
        """First slot of a pass over these slots, and the slot after its last."""
        return (slots[0], slots[-1] + 1) if self._compiled is None else (0, self.slots)

    def keep(self, slots: Tensor) -> None:
        """Continue with only these slots (r,), renumbered in order. Not for `paged`."""
        assert self._blocks is None
        self._past.keep(slots)
        self._ids, self._lengths = self._ids[slots], self._lengths[slots]
        self._routes = None if self._routes is None else self._routes[slots]
        self._uniform = None if self._uniform is None else self._uniform[slots]
        self._texts = [self._texts[slot] for slot in slots.tolist()]
        self.slots, self._next = len(self._texts), None

    def warm(self) -> None:
        """Generate a text and discard it, so that compilation happens before the first request."""
        slot = self.admit(Request(ids=(0,), decoding=Decoding(max_tokens=2, ignore_end=True), route=0))
        assert slot is not None
        while not any(each.finished for each in self.step()):
            pass
        self.release(slot)

    def _pieces(self, room: int) -> Iterator[tuple[int, int, int]]:
        """Yield prompts to read together as first slot, slot after the last, and tokens of each: adjacent new prompts,
        as many as fit into `room` tokens with padding; else a piece of one prompt."""
        low, texts = 0, self._texts
        while low < len(texts) and room > 0:
            text, high = texts[low], low + 1
            if text is not None and text.unread:
                longest, resumed = text.prompt - text.cached, text.cached > 0
                while not resumed and high < len(texts):
                    neighbour = texts[high]
                    if neighbour is None or neighbour.cached:
                        break
                    if (high + 1 - low) * max(longest, neighbour.prompt) > room:
                        break
                    longest, high = max(longest, neighbour.prompt), high + 1
                count = min(room, longest)
                room -= (high - low) * count
                yield low, high, count
            low = high

    def _read_prompts(self, low: int, high: int, count: int) -> Tensor:
        """Read the next `count` tokens of some prompts; return logits (r, V) after the last of each."""
        texts = [self._text(slot) for slot in range(low, high)]
        begin, rows = texts[0].cached, self._rows(low, high)
        for text in texts:
            text.cached = min(begin + count, text.prompt)
        source = lengths = None
        if texts[0].source:
            sources = [text.request.ids for text in texts]
            longest = max(map(len, sources))
            source = torch.tensor(
                [[*ids, *[0] * (longest - len(ids))] for ids in sources], device=self.device
            )
            self._lengths[low:high] = torch.tensor([len(ids) for ids in sources], device=self.device)
            lengths = self._lengths[low:high]
            self._past.remember(self._lengths, self._source)
            for text in texts:
                text.source = False
        places = torch.arange(begin, begin + count, device=self.device)
        self._look(texts)
        # Padding is written after its text, to columns that are written again before they are read.
        self._past.at(
            places, columns=begin, width=begin + count, rows=rows, first=begin == 0, alone=count == 1
        )
        last = [number * count + text.cached - begin - 1 for number, text in enumerate(texts)]
        with eagerly():
            logits = run_pass(
                self.model, self._past, self._ids[low:high, begin : begin + count],
                torch.tensor(last, device=self.device), source, lengths, self._routed(low, high),
            )  # fmt: skip
        for text in texts:
            if self._blocks is not None and text.table is not None:
                self._blocks.publish(text.table, text.cached)
        return logits

    def _routed(self, low: int, high: int) -> Tensor | None:
        """Labels of the texts in these slots, if labels choose experts."""
        return None if self._routes is None else self._routes[low:high]

    def _rows(self, low: int, high: int) -> slice:
        return slice(None) if (low, high) == (0, self.slots) else slice(low, high)

    def _decode(self, batch: _Batch) -> Tensor:
        """Logits (r, V) after the newest token of each of these texts."""
        low, high = self._span(batch.slots)
        longest, wanted_rows = max(text.cached for text in batch.texts), None
        width, rows = longest + 1, self._rows(low, high)
        if batch.places is None:
            self._look(batch.texts)
            places = self._every[longest:width]
            self._past.at(places, columns=longest, width=width, rows=rows, alone=True)
            logits = run_pass(self.model, self._past, batch.tokens, routes=self._routed(low, high))
        else:
            columns, texts = batch.places, self._texts[low:high]
            if not batch.every:
                # An empty slot in between, or one that reads its prompt, writes where nothing is read before it is
                # overwritten.
                cached = [min(text.cached, self.context - 1) if text else 0 for text in texts]
                columns, width = torch.tensor(cached, device=self.device)[:, None], max(cached) + 1
                wanted_rows = torch.tensor(batch.slots, device=self.device) - low
            if self._compiled is not None:
                assert isinstance(self._past.store, Columns)
                width, now = bucket(width), self._past.store.width
                width = width if width <= now // 2 else max(width, bucket(now))  # a long text has finished
                # One graph serves all steps, if no tensor is passed twice.
                columns = columns.clone() if batch.every else columns
                logits = self._compiled(self._past, batch.tokens, batch.places, columns, width)
                logits = logits if wanted_rows is None else logits[wanted_rows]
            else:
                self._look([text if text in batch.texts else None for text in texts])
                self._past.at(batch.places, columns=columns, width=width, rows=rows)
                routes = self._routed(low, high)
                logits = run_pass(self.model, self._past, batch.tokens, wanted_rows, routes=routes)
        for text in batch.texts:
            text.cached += 1
        return logits

    def _look(self, texts: Sequence[_SlotText | None]) -> None:
        """Set the blocks of these texts in a paged cache; slots without a text write to the spare block."""
        if self._blocks is None or not isinstance(self._past.store, Pages):
            return
        longest = max(len(text.table.blocks) if text and text.table else 1 for text in texts)
        spare = self._blocks.count
        rows = [text.table.blocks if text and text.table else [] for text in texts]
        table = [[*row, *[spare] * (longest - len(row))] for row in rows]
        self._past.store.look(torch.tensor(table, device=self.device))

    def _choose(self, slots: list[int], logits: Tensor, following: Tensor | None = None) -> Tensor:
        """The next token (r,) of each of these slots, whose texts may have different settings. `following` (r, 1) holds
        the positions of these tokens, if they are known on the device."""
        groups: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            groups.setdefault(id(self._text(slot).settings), []).append(place)
        if len(groups) == 1:
            return self._choose_alike(slots, logits, following)
        tokens = self._lengths.new_empty(len(slots))
        for places in groups.values():
            tokens[places] = self._choose_alike([slots[place] for place in places], logits[places])
        return tokens

    def _choose_alike(self, slots: list[int], logits: Tensor, following: Tensor | None = None) -> Tensor:
        """The next token (r,) of each of these slots; all texts have equal settings."""
        texts = [self._text(slot) for slot in slots]
        settings, history, uniform = texts[0].settings, None, None
        together = slots[-1] - slots[0] + 1 == len(slots)
        rows: Any = slice(slots[0], slots[-1] + 1) if together else torch.tensor(slots, device=self.device)
        new = self._column([text.generated for text in texts])
        lengths: Any = following
        if following is None:
            lengths = self._column([text.prompt + text.generated for text in texts])
        if settings.looks_back:
            longest = max(text.prompt + text.generated for text in texts)
            history = history_of(self._ids[rows, :longest], lengths)
        if settings.draws:
            assert self._uniform is not None
            drawn = self._uniform[rows]
            uniform = drawn[:, new] if isinstance(new, int) else drawn.gather(1, new)[:, 0]
        ends = None if settings.ignore_end else self._ends
        tokens = next_tokens(logits, settings, uniform, history, new, ends, lengths - new)
        if isinstance(lengths, int):
            self._ids[rows, lengths] = tokens
        elif together:
            self._ids[rows].scatter_(1, lengths, tokens[:, None])
        else:
            self._ids[rows, lengths[:, 0]] = tokens
        for text in texts:
            text.generated += 1
            text.done = text.generated >= text.request.max_tokens
        return tokens

    def _column(self, numbers: list[int]) -> int | Tensor:
        """One number if all are equal, else a column (r, 1)."""
        if min(numbers) == max(numbers):
            return numbers[0]
        return torch.tensor(numbers, device=self.device)[:, None]

    def _text(self, slot: int) -> _SlotText:
        text = self._texts[slot]
        assert text is not None
        return text

    def _result(self, slot: int, token: int) -> SlotResult:
        text = self._text(slot)
        if token in self.ends and not text.request.decoding.ignore_end:
            text.done, self._next = True, None
            return SlotResult(slot, (), "stop", token)
        return SlotResult(slot, (token,), "length" if text.done else "")
