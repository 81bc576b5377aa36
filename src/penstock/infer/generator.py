"""`penstock.Generator`: texts from a trained model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch

from penstock.boundary.files import quoted
from penstock.config.decoding import Decoding
from penstock.config.formats import Weights
from penstock.config.load import from_dict
from penstock.config.plan import Plan
from penstock.data.text.chat import template_of
from penstock.data.text.tokenizers import Tokenizer
from penstock.decode.beam import search
from penstock.decode.choose import NOTHING
from penstock.decode.engine import Engine, Finished, Request
from penstock.decode.sample import sample
from penstock.decode.speculate import Draft, Guess, look_up, speculate
from penstock.decode.stages import in_parts, stages_of
from penstock.decode.static import Compiled
from penstock.decode.texts import Prompts
from penstock.errors import ConfigError
from penstock.infer.load import Loaded, loaded
from penstock.infer.ranks import from_all_ranks, from_rank_zero, own_texts, together
from penstock.infer.text import Stream, needed, prompt_numbers
from penstock.infer.usual import SEARCH, chosen, lengths, report_dropped, with_rules
from penstock.models.model import Model
from penstock.parallel import ALONE, local_device
from penstock.parallel.hosts import attend
from penstock.products.shortlist import read_shortlist

Prompt = str | Sequence[int]
_SPREAD = 0x9E3779B9
"""Distance between the seeds of a call's texts."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One generated text."""

    text: str
    """Empty without a tokenizer."""
    ids: tuple[int, ...]
    """New tokens, without the one that ended the text."""
    finished: Finished
    """`stop`: at the model's end of text or before a stop text; `length`: after `max_tokens` tokens."""
    score: float | None = None
    """Score in beam search: the sum of log-probabilities, divided by the length to the power of the length penalty."""


class Generator:
    """A decoder or an encoder–decoder that continues or translates texts.

    `model` is one of ours, or a path: a run's export, or a folder of transformers with GPT-2, Llama, Mistral, Qwen 2 or
    3, Gemma 2 or 3, Phi-3 or 4, OLMo 2, SmolLM 3, GLM 4, T5, mT5, BART or Marian. The Plan sets the dtype of the
    computation (`precision=O3 dtype=bf16`), and `weights` how weights are stored: see `penstock.products.convert`. With
    `compile=whole` or `compile=blocks` each decoding step is one compiled graph, compiled at first use: see
    `penstock.decode.static`. `draft` is a smaller model with the same vocabulary, for `speculate`.

    With `tp`, `pp` or `dp` in the Plan, that many ranks make the same calls, and each gets all texts: see
    `penstock.infer.ranks`. With `ep`, each rank hosts some experts of a mixture: see `penstock.parallel.hosts`. Ranks
    are the processes of the existing process group, or those that `penstock launch` or torchrun started, which
    synchronise again when `with` ends.

    Raises ConfigError for a model that does not generate or a Plan that inference does not support, and the errors of
    opening a folder.
    """

    def __init__(
        self, model: str | Path | Model, plan: Plan | None = None, *, weights: Weights = "auto",
        tokenizer: Tokenizer | None = None, start: int | None = None, ends: Sequence[int] | None = None,
        draft: str | Path | Model | None = None, shortlist: Sequence[int] | str | Path = (),
        only: Sequence[str] = (), device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """`start` is the first token of an encoder–decoder's decoder, `ends` are the tokens that end a text; None: as
        the model's folder says, or its tokenizer. With a `shortlist`, token numbers or a file of them, only these
        tokens and those that end a text are generated, and the output layer computes only their logits. With several
        ranks, `cuda` is each rank's GPU. `only` are labels of texts: only the experts that they choose are read."""
        plan, self.device = plan or Plan(), torch.device(device)
        self.dims = ALONE
        with ExitStack() as joining:
            if plan.gpus > 1:
                self.device = local_device(self.device)
                ranks = together(plan, self.device, weights=weights, shortlist=bool(shortlist))
                self.dims = joining.enter_context(ranks)
            listed = read_shortlist(shortlist) if isinstance(shortlist, str | Path) else tuple(shortlist)
            listed = (*listed, *(ends or ())) if listed else ()
            opens = partial(loaded, plan=plan, weights=weights, device=self.device, dims=self.dims, only=only)
            opened = _generating(opens(model, tokenizer=tokenizer, shortlist=listed))
            self.whole_bytes, self.bytes = opened.whole_bytes, opened.bytes
            """Bytes of all weights in the model's folder, and of the weights that were read."""
            self.model: Model = opened.model
            self.tokenizer = opened.tokenizer
            self.start = opened.start if start is None else start
            self.ends: tuple[int, ...] = opened.ends if ends is None else tuple(ends)
            self.usual, self._dropped = opened.usual, set[str]()
            """Fields of `Decoding` that the model's folder sets, as transformers would apply them."""
            self.labels = opened.labels
            if self.model.graph.remembered and self.start is None:
                raise ConfigError(
                    "The model does not say which token its decoder begins with; give its number as start."
                )
            self._draft: Model | None = None
            if draft is not None:
                drafting = _generating(opens(draft, tokenizer=None, companion=self.model))
                small = drafting.model
                same = type(small) is type(self.model)
                if not same or small.config.vocabulary != self.model.config.vocabulary:
                    raise ConfigError(
                        "A draft model must be of the same family and vocabulary as the model it drafts for."
                    )
                if drafting.labels.names not in ((), self.labels.names):
                    raise ConfigError(
                        "Labels choose the draft model's experts; use one with the labels of the model it drafts for."
                    )
                self._draft = small
            self._compiled = Compiled(self.model) if plan.compile != "none" else None
            self._joined = joining.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: Any) -> None:
        self._joined.__exit__(*problem)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], decoding: Decoding | None = None, *,
        label: str | Sequence[str] | None = None, **settings: Any,
    ) -> list[Generated]:  # fmt: skip
        """Continue or translate prompts, given as texts or token numbers: `decoding.best` texts for each, in order.

        `settings` are fields of `Decoding`; the model's folder sets the others (`usual`). A `decoding` replaces the
        folder's settings, except for its biases and forced tokens. `label`, one for all prompts or one for each,
        chooses the experts of a model whose router is `given`; without it, each prompt begins with its label, if
        prompts did in training. Raises ConfigError for settings that contradict each other, for prompts that are too
        long for the model, and for labels that are missing or unknown.
        """
        decoding = self._settings(decoding, settings)
        texts = _several(prompts)
        rows, routes = [self.encode(prompt) for prompt in texts], self.labels.numbers(texts, label)
        decoding = self._bounded(rows, decoding)
        share, best = own_texts(len(rows), self.dims), decoding.best
        seeds = self._seeds(decoding, len(rows) * best)[share.start * best : share.stop * best]
        rows, routes = rows[share], routes[share]

        def generated(part: slice) -> list[Generated]:
            own_seeds = seeds[part.start * best : part.stop * best]
            return self._generated(rows[part], routes[part], own_seeds, decoding)

        texts_here = in_parts(stages_of(self.model), generated, len(rows), self.dims) if rows else []
        attend(self.model)
        return from_all_ranks(texts_here, self.dims)

    @torch.inference_mode()
    def _generated(
        self, rows: list[list[int]], routes: list[int | None], seeds: list[int | None], decoding: Decoding
    ) -> list[Generated]:
        """`decoding.best` texts for each of some prompts with labels, each drawn with its own seed."""
        every = [row for row in rows for _ in range(decoding.best)]
        every_route = [route for route in routes for _ in range(decoding.best)]
        scores: list[float | None] = [None] * len(every)
        how: Any = {"ends": self.ends, "compiled": self._compiled}
        if decoding.beams > 1:
            hypotheses = search(self.model, self._prompts(rows, routes), decoding, **how)
            texts, scores = hypotheses.tokens.flatten(0, 1).tolist(), hypotheses.scores.flatten().tolist()
        elif decoding.speculate:
            given = zip(every, every_route, seeds, strict=True)
            texts = [self._speculated(row, route, replace(decoding, seed=seed)) for row, route, seed in given]
        elif decoding.stop and self.tokenizer is not None:
            return self._by_slots(every, every_route, seeds, decoding)
        else:
            texts = sample(
                self.model, self._prompts(every, every_route), decoding, seeds=seeds, **how
            ).tolist()
        return [
            self._as_generated(row, _until(ids), decoding, score)
            for row, ids, score in zip(every, texts, scores, strict=True)
        ]

    def stream(
        self, prompt: Prompt, decoding: Decoding | None = None, *, label: str | None = None, **settings: Any
    ) -> Iterator[str]:
        """Yield the text that continues or translates a prompt in pieces, as it is generated. Only greedy and drawn
        texts can be streamed. `label` is as in `generate`. With several ranks, each must read the stream to its end."""
        decoding = self._settings(decoding, settings, without=SEARCH)
        if self.tokenizer is None:
            raise ConfigError("Text needs a tokenizer, and this model has none; pass one to Generator.")
        ids, (route,) = self.encode(prompt), self.labels.numbers([prompt], label)
        decoding = self._bounded([ids], decoding)
        for _, _, piece, _ in self._in_slots([ids], [route], [decoding.seed], decoding):
            if piece:
                yield piece
        attend(self.model)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token numbers of a prompt: a decoder's with the tokenizer's opening tokens, a source with its end token."""
        return prompt_numbers(prompt, self.tokenizer, source=bool(self.model.graph.remembered))

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token numbers of messages, each with `role` and `content`, up to the beginning of the model's next answer: a
        prompt for `generate` and `stream`. Raises ConfigError for a model without a chat template."""
        words = needed(self.tokenizer)
        template = template_of(words)
        if template is None:
            raise ConfigError(
                "The model's folder has no chat template, so it cannot chat. Give it prompts without --chat, or tune "
                "it with `penstock train --from MODEL --task chat`."
            )
        numbers: list[int] = words.encode_marked([template.text(messages)])[0][0].tolist()
        return numbers

    def _settings(
        self, decoding: Decoding | None, settings: dict[str, Any], without: Sequence[str] = ()
    ) -> Decoding:
        """The settings of a call, without the folder's settings that `without` names."""
        if decoding is None:
            usual = {name: value for name, value in self.usual.items() if name not in without}
            fields, dropped = chosen(usual, settings)
            report_dropped(
                {*dropped, *(name for name in without if name in self.usual)} - {*settings}, self._dropped
            )
            decoding = from_dict(Decoding, fields)
        else:
            decoding = replace(with_rules(self.usual, decoding), **settings)
        if decoding.draws and decoding.seed is None and not self.dims.alone:
            seed = random.SystemRandom().randrange(1 << 31)
            decoding = replace(decoding, seed=from_rank_zero(seed, self.dims))
        return decoding

    def _prompts(self, rows: list[list[int]], routes: list[int | None]) -> Prompts:
        start = self.start if self.model.graph.remembered else None
        return Prompts.of(rows, start=start, device=self.device, routes=routes)

    def _bounded(self, rows: list[list[int]], decoding: Decoding) -> Decoding:
        """The settings with `max_tokens` filled in. Raises ConfigError for prompts that the model does not support."""
        config = self.model.config
        size: int = config.vocabulary
        remembered = self.model.graph.remembered
        source, room = self.model.graph.runs[0].max_tokens, self.model.graph.written[-1].max_tokens
        if not decoding.max_tokens:
            longest = 1 if remembered else max(map(len, rows), default=1)
            sizes = lengths(self.usual, vars(decoding), longest, room)
            decoding = replace(decoding, **cast(Any, sizes))
        for row in rows:
            own = 1 if remembered else len(row)
            if not row:
                raise ConfigError(
                    "A prompt has no tokens, and this tokenizer puts none before a text; write something."
                )
            if own + decoding.max_tokens > room:
                raise ConfigError(
                    f"A prompt has {own:,} tokens and {decoding.max_tokens:,} are to be generated, but the model has "
                    f"{room:,} positions; lower max_tokens, or shorten the prompt."
                )
            if remembered and len(row) > source:
                raise ConfigError(f"A source has {len(row):,} tokens, but the model reads {source:,}.")
            if not (min(row) >= 0 and max(row) < size):
                raise ConfigError(f"A prompt has a token outside of the model's vocabulary of {size:,}.")
        if max(decoding.named_tokens, default=0) >= size:
            raise ConfigError(f"decoding names a token outside of the model's vocabulary of {size:,}.")
        if decoding.stop and self.tokenizer is None:
            raise ConfigError("decoding.stop needs a tokenizer, and this model came without one.")
        return decoding

    @staticmethod
    def _seeds(decoding: Decoding, count: int) -> list[int | None]:
        """One seed for each text: texts of a call differ, and the first text is the same as in a call with one text."""
        if decoding.seed is None:
            return [None] * count
        return [(decoding.seed + number * _SPREAD) % 2**31 for number in range(count)]

    def _speculated(self, row: list[int], route: int | None, decoding: Decoding) -> list[int]:
        both = bool(self.model.graph.remembered)
        ids = [self.start] if both and self.start is not None else row
        source = row if both else []
        guess: Guess = look_up
        if self._draft is not None:
            columns = len(ids) + decoding.max_tokens + decoding.speculate + 1
            guess = Draft(self._draft, decoding, len(ids), columns, source, route).guess
        return speculate(self.model, ids, decoding, guess, ends=self.ends, source=source, route=route)

    def _in_slots(
        self, rows: list[list[int]], routes: list[int | None], seeds: list[int | None], decoding: Decoding
    ) -> Iterator[tuple[int, tuple[int, ...], str, Finished]]:
        """Yield the number of a text, its new tokens, the new piece of text, and why it ended. A text that ends, for
        example before a stop text, frees its slot for the next."""
        longest = 1 if self.model.graph.remembered else max(map(len, rows))
        engine = Engine(
            self.model, slots=min(len(rows), 32), context=longest + decoding.max_tokens, chunk=1 << 30,
            start=self.start, ends=self.ends, compiled=self._compiled,
        )  # fmt: skip
        waiting, running = list(range(len(rows)))[::-1], dict[int, int]()
        streams = [self._text_after(row, decoding) for row in rows]
        while waiting or running:
            while waiting:
                number = waiting[-1]
                own = replace(decoding, seed=seeds[number])
                slot = engine.admit(Request(ids=tuple(rows[number]), decoding=own, route=routes[number]))
                if slot is None:
                    break
                running[slot] = waiting.pop()
            for slot, tokens, why, _ in engine.step():
                number, text = running[slot], streams[running[slot]]
                piece = text.add(tokens) + (text.end() if why else "")
                ended: Finished = "stop" if text.stopped else why
                yield number, tokens, piece, ended
                if ended:
                    engine.release(slot)
                    del running[slot]

    def _by_slots(
        self, rows: list[list[int]], routes: list[int | None], seeds: list[int | None], decoding: Decoding
    ) -> list[Generated]:
        texts = [Generated("", (), "")] * len(rows)
        for number, tokens, piece, why in self._in_slots(rows, routes, seeds, decoding):
            before = texts[number]
            texts[number] = Generated(before.text + piece, before.ids + tokens, why)
        return texts

    def _text_after(self, prompt: Sequence[int], decoding: Decoding) -> Stream:
        """A stream for the text that continues a prompt, or translates a source."""
        return Stream(needed(self.tokenizer), decoding.stop, () if self.model.graph.remembered else prompt)

    def _as_generated(
        self, prompt: Sequence[int], ids: list[int], decoding: Decoding, score: float | None = None
    ) -> Generated:
        finished: Finished = "stop" if len(ids) < decoding.max_tokens else "length"
        if self.tokenizer is None:
            return Generated("", tuple(ids), finished, score)
        text = self._text_after(prompt, decoding)
        text.add(ids)
        text.end()
        return Generated(text.text, tuple(ids), "stop" if text.stopped else finished, score)


def _generating(opened: Loaded) -> Loaded:
    """Return the model. Raises ConfigError if it does not generate."""
    if not opened.model.graph.generates:
        raise ConfigError(
            "The model does not generate text. Give a decoder or an encoder–decoder; for others there are "
            "penstock.Embedder and penstock.Classifier."
        )
    return opened


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    every: list[Any] = list(prompts)
    if every and all(isinstance(each, int) for each in every):
        return [every]
    if not every:
        raise ConfigError(f"There are no prompts in {quoted(str(prompts))}; give a text, or several.")
    return every


def _until(row: list[int]) -> list[int]:
    return row[: row.index(NOTHING)] if NOTHING in row else row
