"""One token after the other for all texts of a batch: the likeliest, or drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.config.decoding import Decoding
from penstock.decode.choose import NOTHING, adjusted, chosen
from penstock.decode.static import Compiled
from penstock.decode.texts import ASK, Prompts, Texts, eagerly, sharded


def uniforms(seeds: Sequence[int | None], steps: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) to draw with, (B, steps): a text's depend on its own seed alone."""
    streams = [random.Random(seed) if seed is not None else random.Random() for seed in seeds]
    return torch.tensor([[one.random() for _ in range(steps)] for one in streams], device=device)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Prompts,
    decoding: Decoding,
    *,
    ends: Sequence[int],
    seeds: Sequence[int | None] = (),
    compiled: Compiled | None = None,
) -> Tensor:
    """New tokens of each text, (B, steps) int64: up to the first of `ends`, which is left out, and then −1.

    `seeds` are those of the texts, where tokens are drawn. Ranks that share a model's weights must all call this with
    as many tokens to make; they take all steps together.
    """
    if compiled is not None:
        return _sampled(model, prompts, decoding, ends, seeds, compiled)
    with eagerly():
        return _sampled(model, prompts, decoding, ends, seeds)


def _sampled(
    model: nn.Module,
    prompts: Prompts,
    decoding: Decoding,
    ends: Sequence[int],
    seeds: Sequence[int | None],
    compiled: Compiled | None = None,
) -> Tensor:
    together = sharded(model)
    steps, device = decoding.max_tokens, prompts.tokens.device
    texts = Texts(model, prompts, steps=steps, compiled=compiled)
    uniform = uniforms(seeds, steps, device) if decoding.draws else None
    stops = None if decoding.ignore_end or not ends else torch.tensor(list(ends), device=device)
    found = torch.full((len(prompts), steps), NOTHING, device=device)
    rows = torch.arange(len(prompts), device=device)
    going = torch.ones(len(prompts), dtype=torch.bool, device=device)
    history = history_of(prompts) if decoding.looks_back else None
    logits = texts.first()
    for step in range(steps):
        # What is computed for the loss in half or single precision is chosen from in single or double.
        wide = logits if logits.dtype == torch.float64 else logits.float()
        past = None if history is None else torch.cat([history, found[rows, :step]], dim=1)
        wide = adjusted(wide, decoding, past, step, stops)
        newest = chosen(wide, decoding, None if uniform is None else uniform[rows, step])
        if stops is not None:
            going = going & ~torch.isin(newest, stops)
        found[rows, step] = torch.where(going, newest, NOTHING)
        if step + 1 == steps:
            break
        if stops is not None and not together and (device.type == "cpu" or step % ASK == ASK - 1):
            if not bool(going.any()):
                break
            kept = texts.remaining(going)
            if kept is not None:
                texts.keep(kept)
                rows, newest, going = rows[kept], newest[kept], going[kept]
                history = None if history is None else history[kept]
        logits = texts.following(newest[:, None])
    return found


def history_of(prompts: Prompts) -> Tensor:
    """The decoder's first tokens, (B, P), the last at the right."""
    length = prompts.tokens.shape[1]
    places = torch.arange(length, device=prompts.tokens.device) - (length - prompts.lengths[:, None])
    return torch.where(places >= 0, prompts.tokens.gather(1, places.clamp(min=0)), NOTHING)
