"""Beam search, and its form in groups that differ from each other (Vijayakumar et al., AAAI 2018).

All beams of a text are tokens side by side: they share the keys and values of the prompt, of the source and of their
common ancestors, which are never copied; what follows a beam is a line of a table that says whom it sees. Nor are their
tokens: each step keeps which beam the new ones continue, and texts are read back from these at the end.

Shapes: B texts, b beams of a group, T steps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.decode.choose import NOTHING, adjust_logits
from penstock.decode.stages import stages_of
from penstock.decode.static import Compiled, bucket
from penstock.decode.texts import ASK, Generating, Prompts, Texts, remaining, sharded
from penstock.dtypes import sums_type
from penstock.kernels.beam_step import beam_step, texts_of
from penstock.kernels.beams import OUT, Beams, Terms
from penstock.models.positions import is_real
from penstock.parallel.sequence import all_reduce
from penstock.parallel.tensor import line_of

_SWEEP = 16
"""Steps between two times at which columns that no beam sees any more are left out."""


class BeamTexts(NamedTuple):
    """The best texts of each prompt, the best first."""

    tokens: Tensor
    """(B, best, T), −1 behind the last; without the token that ended a text."""
    scores: Tensor
    """(B, best), sums of log-probabilities over length to the length penalty."""


class _Group:
    """The beams of one group, those that have finished and those that go on."""

    def __init__(
        self, decoding: Decoding, prompts: Prompts, stops: Sequence[int], dtype: torch.dtype
    ) -> None:
        rows, device = len(prompts), prompts.tokens.device
        self.decoding = decoding
        self.terms = Terms(
            size=decoding.beams // decoding.beam_groups,
            steps=decoding.max_tokens,
            stops=tuple(stops),
            length_penalty=decoding.length_penalty,
            stopping=decoding.early_stopping,
        )
        self.beams = Beams.first(rows, self.terms.size, dtype, device)
        self.parents: list[Tensor] = []
        self.choices: list[Tensor] = []
        self._stops = torch.tensor(self.terms.stops, device=device) if stops else None
        self._tokens: Tensor | None = None
        """(B, b, T), where the next tokens depend on them."""
        if decoding.looks_back:
            self._tokens = torch.full((rows, self.terms.size, self.terms.steps), NOTHING, device=device)

    def step(
        self, logits: Tensor, step: int, history: Tensor | None, others: Tensor | None, cover: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take logits (B, b, V) of the next token: (B, b) the beam that each new beam continues, and with which token.

        `others` (B, n) are tokens that earlier groups chose in this step, `cover` (B, b) the penalty of each beam for
        the tokens of the source that it has not attended to.
        """
        decoding, logits = self.decoding, logits.flatten(0, 1)
        changed = bool(decoding.looks_back or decoding.bias or decoding.min_tokens or others is not None)
        if changed:
            logits = self._changed(torch.log_softmax(logits, dim=-1), step, history, others)
        result = beam_step(logits, self.beams, step, self.terms, normed=changed, cover=cover)
        self.beams = result.beams
        self.parents.append(result.parents)
        self.choices.append(result.chosen)
        if self._tokens is not None:
            lines = result.parents[:, :, None].expand(-1, -1, self.terms.steps)
            self._tokens = self._tokens.gather(1, lines)
            self._tokens[:, :, step] = result.chosen
        return result.parents, result.chosen

    def _changed(self, shares: Tensor, step: int, history: Tensor | None, others: Tensor | None) -> Tensor:
        """Log-probabilities (B·b, V) after penalties."""
        if history is not None and self._tokens is not None:
            history = torch.cat([history, self._tokens[:, :, :step].flatten(0, 1)], dim=1)
        shares = adjust_logits(shares, self.decoding, history, step, self._stops)
        if others is not None:
            others = others.repeat_interleave(self.terms.size, dim=0)
            penalties = torch.full_like(others, -self.decoding.diversity_penalty, dtype=shares.dtype)
            shares = shares.scatter_add(1, others, penalties)
        return shares

    def going(self) -> Tensor:
        """Which texts are still searched, (B,)."""
        going = self.beams.hopeful.squeeze(1)
        if self.decoding.early_stopping == "full":
            going = going & ~self.beams.finished.all(1)
        return going

    def done(self) -> Tensor:
        """Tokens (B, b, T) of the texts that have finished."""
        return texts_of(self.beams.done, self.parents, self.choices, self.terms.steps)

    def only(self, rows: Tensor) -> None:
        """Leave all but some texts out."""
        self.beams = self.beams.only(rows)
        self.parents = [parents[rows] for parents in self.parents]
        self.choices = [chosen[rows] for chosen in self.choices]
        self._tokens = None if self._tokens is None else self._tokens[rows]


class _Sight:
    """Which columns of the cache each beam sees: those of the prompt and of its own ancestors."""

    def __init__(self, texts: Texts, beams: int, steps: int) -> None:
        self.texts, self.beams = texts, beams
        prompts = texts.prompts
        rows, prompt = prompts.tokens.shape
        device = prompts.tokens.device
        self.seen = torch.zeros(rows, beams, bucket(prompt + steps * beams), dtype=torch.bool, device=device)
        self.seen[:, :, :prompt] = is_real(prompts.lengths, prompt)[:, None]
        self.itself = torch.eye(beams, dtype=torch.bool, device=device)

    def follow(self, parents: Tensor) -> Tensor:
        """Each beam sees what its parent saw, and itself: (B, beams, columns) of the next pass and later ones."""
        filled = self.texts.filled
        lines = parents[:, :, None].expand(-1, -1, filled)
        self.seen[:, :, :filled] = self.seen[:, :, :filled].gather(1, lines)
        self.seen[:, :, filled : filled + self.beams] = self.itself
        return self.seen

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
def search(
    model: Generating,
    prompts: Prompts,
    decoding: Decoding,
    *,
    ends: Sequence[int],
    compiled: Compiled | None = None,
) -> BeamTexts:
    """The best texts that beam search finds for each prompt. `ends` are the tokens that end a text.

    Ranks that share a model's weights must all call this with as many tokens to make; they take all steps together.
    """
    together, device, steps = sharded(model), prompts.tokens.device, decoding.max_tokens
    beams, best = decoding.beams, decoding.best
    covers = bool(decoding.coverage_penalty) and prompts.source is not None
    texts = Texts(model, prompts, steps=steps, side_by_side=beams, compiled=None if covers else compiled)
    sight = _Sight(texts, beams, steps)
    cover = _Cover(texts, decoding) if covers else None
    logits = texts.first()
    dtype = sums_type(logits.dtype)
    stops = () if decoding.ignore_end else ends
    groups = [_Group(decoding, prompts, stops, dtype) for _ in range(decoding.beam_groups)]
    size = groups[0].terms.size
    logits = logits.repeat_interleave(beams, dim=0)
    history = prompts.history().repeat_interleave(size, dim=0) if decoding.looks_back else None
    tokens = torch.full((len(prompts), best, steps), NOTHING, device=device)
    scores = torch.full((len(prompts), best), OUT, dtype=dtype, device=device)
    rows = torch.arange(len(prompts), device=device)
    for step in range(steps):
        shaped = logits.to(dtype).view(len(rows), beams, -1)
        parents, chosen = _step_groups(groups, shaped, step, history, cover)
        if step + 1 == steps:
            break
        going = None if any(group.beams.fresh for group in groups) else _texts_going(groups)
        asks = going is not None and not together and (device.type == "cpu" or step % ASK == ASK - 1)
        if asks and going is not None and not bool(going.any()):
            break
        if step % _SWEEP == _SWEEP - 1:
            sight.sweep(parents)
        rows_left = remaining(going, texts.compiled) if asks and going is not None else None
        if rows_left is not None:
            tokens[rows], scores[rows] = _best(groups, best)
            count, rows, parents, chosen = len(rows), rows[rows_left], parents[rows_left], chosen[rows_left]
            for part in (
                texts.keep,
                sight.only,
                *(group.only for group in groups),
                *([cover.only] if cover else []),
            ):
                part(rows_left)
            history = None if history is None else history.view(count, size, -1)[rows_left].flatten(0, 1)
        logits = texts.following(chosen, sight.follow(parents))
        if cover is not None:
            cover.follow(parents)
    tokens[rows], scores[rows] = _best(groups, best)
    return BeamTexts(tokens, scores)


def _texts_going(groups: list[_Group]) -> Tensor:
    """Which texts some group still searches, (B,)."""
    return torch.stack([group.going() for group in groups]).any(0)


def _step_groups(
    groups: list[_Group], logits: Tensor, step: int, history: Tensor | None, cover: _Cover | None
) -> tuple[Tensor, Tensor]:
    """One step of all groups, each after those before it: parents and tokens of all beams, twice (B, beams)."""
    size = groups[0].terms.size
    penalties = None if cover is None else cover.penalties()
    if len(groups) == 1:
        return groups[0].step(logits, step, history, None, penalties)
    parents: list[Tensor] = []
    chosen: list[Tensor] = []
    for number, group in enumerate(groups):
        columns = slice(number * size, (number + 1) * size)
        others = torch.cat(chosen, dim=1) if chosen and group.decoding.diversity_penalty else None
        penalty = None if penalties is None else penalties[:, columns]
        parent, token = group.step(logits[:, columns].contiguous(), step, history, others, penalty)
        parents.append(parent + number * size)
        chosen.append(token)
    return torch.cat(parents, dim=1), torch.cat(chosen, dim=1)


def _best(groups: list[_Group], best: int) -> tuple[Tensor, Tensor]:
    """The best texts of all groups."""
    done = torch.cat([group.done() for group in groups], dim=1)
    scores, places = torch.cat([group.beams.done_scores for group in groups], dim=1).topk(best)
    return done.gather(1, places[:, :, None].expand(-1, -1, done.shape[2])), scores


class _Cover:
    """How much each beam has attended to each token of the source."""

    def __init__(self, texts: Texts, decoding: Decoding) -> None:
        source, lengths = texts.prompts.source, texts.prompts.source_lengths
        assert source is not None
        assert lengths is not None
        self.texts, self.weight, self.beams = texts, decoding.coverage_penalty, decoding.beams
        self.line, self.stages = line_of(texts.model), stages_of(texts.model)
        self.real = is_real(lengths, source.shape[1])[:, None]
        texts.past.watched = source.new_zeros(0)
        self.looked: Tensor | None = None

    def _watched(self) -> Tensor:
        assert self.texts.past.watched is not None
        watched = self.texts.past.watched.float()
        # The mean over heads; a rank that splits layers has that of its own.
        watched = watched if self.line is None else all_reduce(watched, self.line) / self.line.count
        return watched if self.stages is None else self.stages.share_last(watched)

    def follow(self, parents: Tensor) -> None:
        """Add the attention of the last pass to that of the parents."""
        assert self.looked is not None
        lines = parents[:, :, None].expand(-1, -1, self.looked.shape[2])
        self.looked = self.looked.gather(1, lines) + self._watched()

    def penalties(self) -> Tensor:
        """(B, beams): weight · Σ log min(looked, 1) over the tokens of the source."""
        if self.looked is None:
            self.looked = self._watched().expand(-1, self.beams, -1)
        lacking = self.looked.clamp(max=1.0).clamp(min=math.exp(-50)).log()
        return self.weight * lacking.masked_fill(~self.real, 0.0).sum(-1)

    def only(self, rows: Tensor) -> None:
        assert self.looked is not None
        self.looked, self.real = self.looked[rows], self.real[rows]
