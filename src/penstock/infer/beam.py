"""Beam search, and its form in groups that differ from each other (Vijayakumar et al., AAAI 2018).

All beams of a text are tokens side by side: they share the keys and values of the prompt, of the source and of their
common ancestors, which are never copied; what follows a beam is a line of a table that says whom it sees. Which
candidates are kept, when a beam has finished and when the search ends is as transformers defines it.

Shapes: B texts, b beams of a group, K candidates, T steps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.infer.choose import NOTHING, adjusted
from penstock.infer.sample import history_of
from penstock.infer.stages import stages_of
from penstock.infer.texts import Generating, Prompts, Texts, sharded
from penstock.kernels.top import log_total, top
from penstock.parallel.sequence import added
from penstock.parallel.tensor import line_of

_OUT = -1e9
"""Score of what must not be chosen; transformers' own, for sums of it are compared."""
_SWEEP = 16
"""Steps between two times at which columns that no beam sees any more are left out."""


class Found(NamedTuple):
    """The best texts of each prompt, the best first."""

    tokens: Tensor
    """(B, best, T), −1 behind the last; without the token that ended a text."""
    scores: Tensor
    """(B, best), sums of log-probabilities over length to the length penalty."""


class _Group:
    """The beams of one group, those that have finished and those that go on."""

    def __init__(
        self, decoding: Decoding, prompts: Prompts, stops: Tensor | None, dtype: torch.dtype
    ) -> None:
        rows, device = len(prompts), prompts.tokens.device
        self.decoding, self.stops = decoding, stops
        self.size = decoding.beams // decoding.beam_groups
        self.steps = decoding.max_tokens
        self.kept = max(2, 1 + (0 if stops is None else len(stops))) * self.size
        self.scores = torch.full((rows, self.size), _OUT, dtype=dtype, device=device)
        self.scores[:, 0] = 0.0  # at first all beams are the same
        self.tokens = torch.full((rows, self.size, self.steps), NOTHING, device=device)
        self.done = self.tokens.clone()
        self.done_scores = torch.full_like(self.scores, _OUT)
        self.finished = torch.zeros_like(self.scores, dtype=torch.bool)
        self.hopeful = torch.ones(rows, 1, dtype=torch.bool, device=device)
        """Whether a beam can still become better than one that has finished."""

    def step(
        self, logits: Tensor, step: int, history: Tensor | None, others: Tensor | None, cover: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take logits (B, b, V) of the next token: (B, b) the beam that each new beam continues, and with which token.

        `others` (B, n) are tokens that earlier groups chose in this step, `cover` (B, b) the penalty for what of the
        source each beam has not looked at.
        """
        values, tokens = self._candidates(logits.flatten(0, 1), step, history, others)
        rows, size, each = len(logits), self.size, values.shape[1]
        totals = (values.view(rows, size, each) + self.scores[:, :, None]).flatten(1)
        scores, places = totals.topk(min(self.kept, size * each))
        parents = places // each
        chosen = tokens.view(rows, size * each).gather(1, places)
        ending = torch.zeros_like(parents, dtype=torch.bool)
        if self.stops is not None:
            ending = torch.isin(chosen, self.stops)
        hits = ending if step + 1 < self.steps else torch.ones_like(ending)
        self._finish(scores, parents, chosen, hits, ending, step, cover)
        running, on = (scores + hits * _OUT).topk(size)
        parents, chosen = parents.gather(1, on), chosen.gather(1, on)
        self.scores = running
        self.tokens = self.tokens.gather(1, parents[:, :, None].expand(-1, -1, self.steps))
        self.tokens[:, :, step] = chosen
        self._look_ahead(step + 1)
        return parents, chosen

    def _candidates(
        self, logits: Tensor, step: int, history: Tensor | None, others: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of each beam with their log-probabilities, twice (B·b, k). More of one beam cannot be
        among the K of all."""
        decoding, wanted = self.decoding, min(self.kept, logits.shape[1])
        if not (decoding.looks_back or decoding.bias or decoding.min_tokens or others is not None):
            values, tokens = top(logits, wanted)
            return values - log_total(logits).to(values.dtype), tokens
        logits = torch.log_softmax(logits, dim=-1)
        if history is not None:
            history = torch.cat([history, self.tokens[:, :, :step].flatten(0, 1)], dim=1)
        logits = adjusted(logits, decoding, history, step, self.stops)
        if others is not None:
            others = others.repeat_interleave(self.size, dim=0)
            taken = torch.full_like(others, -decoding.diversity_penalty, dtype=logits.dtype)
            logits = logits.scatter_add(1, others, taken)
        return top(logits, wanted)

    def _finish(
        self,
        scores: Tensor,
        parents: Tensor,
        chosen: Tensor,
        hits: Tensor,
        ending: Tensor,
        step: int,
        cover: Tensor | None,
    ) -> None:
        """Take over candidates that end among the best b, if they are better than what has finished."""
        counts = hits & (torch.arange(hits.shape[1], device=hits.device) < self.size)
        scores = scores / (step + 1) ** self.decoding.length_penalty
        if cover is not None:
            scores = scores + cover.gather(1, parents)
        if self.decoding.early_stopping == "full":
            scores = scores + self.finished.all(1, keepdim=True) * _OUT
        scores = scores + (~self.hopeful) * _OUT + (~counts) * _OUT
        if (
            self.stops is not None
            and step + 1 < self.steps
            and counts.device.type == "cpu"
            and not counts.any()
        ):
            return
        merged, best = torch.cat([self.done_scores, scores], dim=1).topk(self.size)
        told = self.tokens.gather(1, parents[:, :, None].expand(-1, -1, self.steps))
        told[:, :, step] = torch.where(ending, NOTHING, chosen)
        every = torch.cat([self.done, told], dim=1)
        self.done = every.gather(1, best[:, :, None].expand(-1, -1, self.steps))
        self.done_scores = merged
        self.finished = torch.cat([self.finished, counts], dim=1).gather(1, best)

    def _look_ahead(self, made: int) -> None:
        """Whether the best beam, at the length that suits it, beats the worst that has finished."""
        decoding = self.decoding
        longest = decoding.early_stopping == "never" and decoding.length_penalty > 0
        best = self.scores[:, :1] / (self.steps if longest else made) ** decoding.length_penalty
        worst = torch.where(self.finished, self.done_scores.amin(1, keepdim=True), _OUT)
        self.hopeful = self.hopeful & (best > worst).any(1, keepdim=True)

    def going(self) -> Tensor:
        """Which texts are still searched, (B,)."""
        going = self.hopeful.squeeze(1)
        if self.decoding.early_stopping == "full":
            going = going & ~self.finished.all(1)
        return going

    def only(self, rows: Tensor) -> None:
        """Leave all but some texts out."""
        for name in ("scores", "tokens", "done", "done_scores", "finished", "hopeful"):
            setattr(self, name, getattr(self, name)[rows])


class _Sight:
    """Which columns of the cache each beam sees: those of the prompt and of its own ancestors."""

    def __init__(self, texts: Texts, beams: int, steps: int) -> None:
        self.texts, self.beams = texts, beams
        rows, prompt = texts.prompts.tokens.shape
        self.seen = torch.zeros(
            rows, beams, prompt + steps * beams, dtype=torch.bool, device=texts.prompts.tokens.device
        )
        self.seen[:, :, :prompt] = True
        self.own = torch.eye(beams, dtype=torch.bool, device=self.seen.device)

    def follow(self, parents: Tensor) -> Tensor:
        """Each beam sees what its parent saw, and itself: (B, beams, columns) of the next pass."""
        filled = self.texts.filled
        lines = parents[:, :, None].expand(-1, -1, filled)
        self.seen[:, :, :filled] = self.seen[:, :, :filled].gather(1, lines)
        self.seen[:, :, filled : filled + self.beams] = self.own
        return self.seen[:, :, : filled + self.beams]

    def sweep(self, parents: Tensor) -> None:
        """Leave out columns that no beam sees that is still there."""
        filled = self.texts.filled
        lines = parents[:, :, None].expand(-1, -1, filled)
        live = self.seen[:, :, :filled].gather(1, lines).any(1)
        count = int(live.sum(1).max())
        if count > 0.75 * filled:
            return
        places = (~live).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        self.texts.past.gather(places)
        self.seen[:, :, :count] = self.seen.gather(2, places[:, None].expand(-1, self.beams, -1))
        self.seen[:, :, count:] = False
        self.texts.filled = count

    def only(self, rows: Tensor) -> None:
        self.seen = self.seen[rows]


@torch.no_grad()
def search(model: Generating, prompts: Prompts, decoding: Decoding, *, ends: Sequence[int]) -> Found:
    """The best texts that beam search finds for each prompt. `ends` are the tokens that end a text.

    Ranks that share a model's weights must all call this with as many tokens to make; they take all steps together.
    """
    together, device, steps = sharded(model), prompts.tokens.device, decoding.max_tokens
    beams, best = decoding.beams, decoding.best
    texts = Texts(model, prompts, steps=steps, side_by_side=beams)
    stops = None if decoding.ignore_end or not ends else torch.tensor(list(ends), device=device)
    sight = _Sight(texts, beams, steps)
    cover = _Cover(texts, decoding) if decoding.coverage_penalty and prompts.source is not None else None
    logits = texts.first()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    groups = [_Group(decoding, prompts, stops, dtype) for _ in range(decoding.beam_groups)]
    size = groups[0].size
    logits = logits.repeat_interleave(beams, dim=0)
    history = history_of(prompts).repeat_interleave(size, dim=0) if decoding.looks_back else None
    tokens = torch.full((len(prompts), best, steps), NOTHING, device=device)
    scores = torch.full((len(prompts), best), _OUT, dtype=dtype, device=device)
    rows = torch.arange(len(prompts), device=device)
    for step in range(steps):
        shaped = logits.to(dtype).view(len(rows), beams, -1)
        parents, chosen = _step_groups(groups, shaped, step, history, cover)
        going = torch.stack([group.going() for group in groups]).any(0)
        if step + 1 == steps or (not together and not bool(going.any())):
            break
        if step % _SWEEP == _SWEEP - 1:
            sight.sweep(parents)
        if not together and int(going.sum()) < 0.75 * len(rows):
            tokens[rows], scores[rows] = _best(groups, best)
            kept = going.nonzero().squeeze(1)
            rows, parents, chosen = rows[kept], parents[kept], chosen[kept]
            for part in (
                texts.keep,
                sight.only,
                *(group.only for group in groups),
                *([cover.only] if cover else []),
            ):
                part(kept)
            history = None if history is None else history.view(len(going), size, -1)[kept].flatten(0, 1)
        logits = texts.following(chosen, sight.follow(parents))
        if cover is not None:
            cover.follow(parents)
    tokens[rows], scores[rows] = _best(groups, best)
    return Found(tokens, scores)


def _step_groups(
    groups: list[_Group], logits: Tensor, step: int, history: Tensor | None, cover: _Cover | None
) -> tuple[Tensor, Tensor]:
    """One step of all groups, each after those before it: parents and tokens of all beams, twice (B, beams)."""
    size = groups[0].size
    penalties = None if cover is None else cover.penalties()
    parents: list[Tensor] = []
    chosen: list[Tensor] = []
    for number, group in enumerate(groups):
        own = slice(number * size, (number + 1) * size)
        others = torch.cat(chosen, dim=1) if chosen and group.decoding.diversity_penalty else None
        part = logits if len(groups) == 1 else logits[:, own].contiguous()
        penalty = None if penalties is None else penalties[:, own]
        found, token = group.step(part, step, history, others, penalty)
        parents.append(found + number * size)
        chosen.append(token)
    return torch.cat(parents, dim=1), torch.cat(chosen, dim=1)


def _best(groups: list[_Group], best: int) -> tuple[Tensor, Tensor]:
    """The best texts of all groups."""
    done = torch.cat([group.done for group in groups], dim=1)
    scores, places = torch.cat([group.done_scores for group in groups], dim=1).topk(best)
    return done.gather(1, places[:, :, None].expand(-1, -1, done.shape[2])), scores


class _Cover:
    """How much each beam has looked at each token of the source."""

    def __init__(self, texts: Texts, decoding: Decoding) -> None:
        source, lengths = texts.prompts.source, texts.prompts.source_lengths
        assert source is not None
        assert lengths is not None
        self.texts, self.weight, self.beams = texts, decoding.coverage_penalty, decoding.beams
        self.line, self.stages = line_of(texts.model), stages_of(texts.model)
        self.real = (torch.arange(source.shape[1], device=source.device) < lengths[:, None])[:, None]
        texts.past.watched = source.new_zeros(0)
        self.looked: Tensor | None = None

    def _told(self) -> Tensor:
        assert self.texts.past.watched is not None
        told = self.texts.past.watched.float()
        # The mean over heads; a rank that splits layers has that of its own.
        told = told if self.line is None else added(told, self.line) / self.line.count
        return told if self.stages is None else self.stages.lasts(told)

    def follow(self, parents: Tensor) -> None:
        """Add what the last pass looked at to what the parents had."""
        assert self.looked is not None
        lines = parents[:, :, None].expand(-1, -1, self.looked.shape[2])
        self.looked = self.looked.gather(1, lines) + self._told()

    def penalties(self) -> Tensor:
        """(B, beams): weight · Σ log min(looked, 1) over the tokens of the source."""
        if self.looked is None:
            self.looked = self._told().expand(-1, self.beams, -1)
        lacking = self.looked.clamp(max=1.0).clamp(min=math.exp(-50)).log()
        return self.weight * lacking.masked_fill(~self.real, 0.0).sum(-1)

    def only(self, rows: Tensor) -> None:
        assert self.looked is not None
        self.looked, self.real = self.looked[rows], self.real[rows]
