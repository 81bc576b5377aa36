"""Beam search.

All beams of a text are computed as tokens of one sequence: they share the keys and values of the prompt, the source and
their common ancestors, which are never copied; a row of a mask per beam says which columns it attends to. Tokens are
not copied either: each step stores the parent of every new beam, and texts are traced back at the end.

Shapes: B texts, b beams, T steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding, bucket
from penstock.decode.choose import NOTHING, adjust_logits, history_of
from penstock.decode.kv_cache import NEVER, Columns, KVCache, run_pass
from penstock.decode.static import Compiled
from penstock.decode.texts import ASK, Prompts, eagerly, remaining, sharded
from penstock.dtypes import sums_type
from penstock.kernels.beam_step import beam_step, texts_of
from penstock.kernels.beams import OUT, Beams, Terms
from penstock.kernels.padding import is_real
from penstock.models.model import Model

_SWEEP = 16
"""Steps between two removals of the columns that no beam attends to any more."""


class BeamTexts(NamedTuple):
    """The best texts of each prompt, the best first."""

    tokens: Tensor
    """(B, best, T), −1 after the last token; without the token that ended a text."""
    scores: Tensor
    """(B, best), sums of log-probabilities, divided by the length to the power of the length penalty."""


class _Search:
    """The finished texts and the beams that continue."""

    def __init__(
        self, decoding: Decoding, prompts: Prompts, stops: Sequence[int], dtype: torch.dtype
    ) -> None:
        rows, device = len(prompts), prompts.tokens.device
        self.decoding = decoding
        self.terms = Terms(
            size=decoding.beams, steps=decoding.max_tokens, stops=tuple(stops),
            length_penalty=decoding.length_penalty, stopping=decoding.early_stopping,
        )  # fmt: skip
        self.beams = Beams.first(rows, self.terms.size, dtype, device)
        self.parents: list[Tensor] = []
        self.choices: list[Tensor] = []
        self._stops = torch.tensor(self.terms.stops, device=device) if stops else None
        self._prompts = prompts.lengths[:, None]
        self._tokens: Tensor | None = None
        """(B, b, P + T), each beam's tokens, prompt included; None if the settings do not depend on them."""
        if decoding.looks_back:
            tokens = torch.full((rows, self.terms.size, self.terms.steps), NOTHING, device=device)
            history = history_of(prompts.tokens, prompts.lengths[:, None])[:, None]
            history = history.expand(-1, self.terms.size, -1)
            self._tokens = torch.cat([history, tokens], dim=2)

    def step(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Make a step from logits (B, b, V) of the next token; return parent and token of each new beam, (B, b)."""
        decoding, logits = self.decoding, logits.flatten(0, 1)
        if decoding.adjusts:
            logits, history = torch.log_softmax(logits, dim=-1), self._tokens
            if history is not None:
                history = history[:, :, : history.shape[2] - self.terms.steps + step].flatten(0, 1)
            prompts = self._prompts.repeat_interleave(self.terms.size, dim=0)
            logits = adjust_logits(logits, decoding, history, step, self._stops, prompts)
        result = beam_step(logits, self.beams, step, self.terms, normed=decoding.adjusts)
        self.beams = result.beams
        self.parents.append(result.parents)
        self.choices.append(result.chosen)
        if self._tokens is not None:
            lines = result.parents[:, :, None].expand(-1, -1, self._tokens.shape[2])
            self._tokens = self._tokens.gather(1, lines)
            self._tokens[:, :, step - self.terms.steps] = result.chosen
        return result.parents, result.chosen

    def going(self) -> Tensor:
        """Texts whose search has not ended, (B,) bool."""
        going = self.beams.hopeful.squeeze(1)
        if self.decoding.early_stopping == "full":
            going = going & ~self.beams.finished.all(1)
        return going

    def best(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens (B, count, T) and scores (B, count) of the best texts that have finished."""
        done = texts_of(self.beams.done, self.parents, self.choices, self.terms.steps)
        scores, places = self.beams.done_scores.topk(count)
        return done.gather(1, places[:, :, None].expand(-1, -1, done.shape[2])), scores

    def only(self, rows: Tensor) -> None:
        """Continue with only the texts in `rows`."""
        self.beams = self.beams.only(rows)
        self.parents = [parents[rows] for parents in self.parents]
        self.choices = [chosen[rows] for chosen in self.choices]
        self._prompts = self._prompts[rows]
        self._tokens = None if self._tokens is None else self._tokens[rows]


class _Passes:
    """The model's passes over the beams of each text. A mask says which columns of the cache each beam attends to: the
    prompt and its own ancestors."""

    def __init__(
        self, model: Model, prompts: Prompts, beams: int, steps: int, compiled: Compiled | None
    ) -> None:
        self.model, self.prompts, self.beams, self.compiled = model, prompts, beams, compiled
        self.routes = prompts.routes if model.graph.routed else None
        """(B,), the label of each text."""
        (rows, longest), device = prompts.tokens.shape, prompts.tokens.device
        columns = longest + steps * beams
        self.seen = torch.zeros(rows, beams, bucket(columns), dtype=torch.bool, device=device)
        self.seen[:, :, :longest] = is_real(prompts.lengths, longest)[:, None]
        self.itself = torch.eye(beams, dtype=torch.bool, device=device)
        columns = columns if compiled is None else bucket(columns)
        self.past = KVCache(
            Columns(rows, columns), rows=1 if prompts.even else rows, columns=columns, positions=columns, device=device
        )  # fmt: skip
        self.filled = longest
        self.places = prompts.lengths[:1, None] if prompts.even else prompts.lengths[:, None]
        """(B, 1) or (1, 1), positions of the next tokens."""

    def first(self) -> Tensor:
        """Read the prompts: logits (B, V) after the last token of each."""
        prompts, (rows, longest) = self.prompts, self.prompts.tokens.shape
        places = torch.arange(longest, device=prompts.tokens.device)
        real = None if prompts.even else torch.where(places < prompts.lengths[:, None], places, NEVER)
        self.past.at(places, columns=0, width=longest, key_places=real, first=True, alone=longest == 1)
        if prompts.source is not None:
            self.past.remember(prompts.source_lengths, prompts.source.shape[1])
        last = torch.arange(rows, device=places.device) * longest + prompts.lengths - 1
        with nullcontext() if self.compiled is None else eagerly():
            return run_pass(
                self.model, self.past, prompts.tokens, last, prompts.source, prompts.source_lengths, self.routes,
                prompts.values,
            )  # fmt: skip

    def following(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read the token of each new beam, (B, beams), which attends to its parent's columns and itself; return logits
        (B · beams, V)."""
        begin, self.filled = self.filled, self.filled + self.beams
        lines = parents[:, :, None].expand(-1, -1, begin)
        self.seen[:, :, :begin] = self.seen[:, :, :begin].gather(1, lines)
        self.seen[:, :, begin : self.filled] = self.itself
        if self.compiled is None:
            places = self.places.expand(-1, self.beams)
            places = places[0] if len(places) == 1 else places
            seen = self.seen[:, :, : self.filled]
            self.past.at(places, columns=begin, width=self.filled, seen=seen)
            values: dict[str, Tensor] | None = None if self.prompts.values is None else {}
            logits = run_pass(self.model, self.past, tokens, routes=self.routes, values=values)
        else:
            assert isinstance(self.past.store, Columns)
            width = bucket(max(self.filled, self.past.store.width))
            self.places = self.places.expand(len(tokens), -1).contiguous()
            columns = torch.arange(begin, self.filled, device=tokens.device)[None]
            seen = self.seen[:, :, :width].contiguous()
            # Tokens with other strides would need a graph of their own.
            logits = self.compiled(self.past, tokens.contiguous(), self.places, columns, width, seen)
        self.places = self.places + 1
        return logits

    def sweep(self, parents: Tensor) -> None:
        """Remove the columns that no remaining beam attends to."""
        lines = parents[:, :, None].expand(-1, -1, self.filled)
        live = self.seen[:, :, : self.filled].gather(1, lines).any(1)
        count = int(live.sum(1).max())
        if count > 0.75 * self.filled:
            return
        places = (~live).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        self.past.gather(places)
        self.seen[:, :, :count] = self.seen.gather(2, places[:, None].expand(-1, self.beams, -1))
        self.seen[:, :, count:] = False
        self.filled = count

    def only(self, rows: Tensor) -> None:
        """Continue with only the texts in `rows`."""
        self.past.keep(rows)
        self.seen = self.seen[rows]
        self.routes = None if self.routes is None else self.routes[rows]
        self.places = self.places[rows] if len(self.places) > 1 else self.places


@torch.no_grad()
def search(
    model: Model, prompts: Prompts, decoding: Decoding, *, ends: Sequence[int],
    compiled: Compiled | None = None,
) -> BeamTexts:  # fmt: skip
    """The best texts that beam search finds for each prompt. `ends` are the tokens that end a text.

    Ranks that share a model's weights must all call this with the same `max_tokens`; they take all steps together.
    """
    together, device, steps = sharded(model), prompts.tokens.device, decoding.max_tokens
    beams, best = decoding.beams, decoding.best
    passes = _Passes(model, prompts, beams, steps, compiled)
    logits = passes.first()
    dtype = sums_type(logits.dtype)
    stops = () if decoding.ignore_end else ends
    searched = _Search(decoding, prompts, stops, dtype)
    logits = logits.repeat_interleave(beams, dim=0)
    tokens = torch.full((len(prompts), best, steps), NOTHING, device=device)
    scores = torch.full((len(prompts), best), OUT, dtype=dtype, device=device)
    rows = torch.arange(len(prompts), device=device)
    for step in range(steps):
        shaped = logits.to(dtype).view(len(rows), beams, -1)
        parents, chosen = searched.step(shaped, step)
        if step + 1 == steps:
            break
        asks = not together and not searched.beams.fresh and (device.type == "cpu" or step % ASK == ASK - 1)
        going = searched.going() if asks else None
        if going is not None and not bool(going.any()):
            break
        if step % _SWEEP == _SWEEP - 1:
            passes.sweep(parents)
        rows_left = None if going is None else remaining(going, compiled)
        if rows_left is not None:
            tokens[rows], scores[rows] = searched.best(best)
            rows, parents, chosen = rows[rows_left], parents[rows_left], chosen[rows_left]
            passes.only(rows_left)
            searched.only(rows_left)
        logits = passes.following(chosen, parents)
    tokens[rows], scores[rows] = searched.best(best)
    return BeamTexts(tokens, scores)
