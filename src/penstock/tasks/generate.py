"""Generating tokens one by one, without a cache: the plain reference, for printed samples and for evaluation.

Every step runs the whole model, over a buffer of one shape, in which the tokens to come are padding that none before
them sees: so compiled code runs as it is. Only the row of the newest token reaches the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    steps: int,
    end: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """What a decoder makes of prompts (B, N) int64 of one length: (B, steps) tokens, the likeliest of each step, or
    drawn by `generator` where `temperature` is above 0. What follows `end` is `end`.

    N + steps − 1 must be within the model's positions. Ranks that share a model's weights must all call this alike.
    """
    length = prompt.shape[1]
    tokens = torch.cat([prompt, prompt.new_zeros(len(prompt), steps)], dim=1)
    places = torch.arange(len(prompt), device=prompt.device) * (tokens.shape[1] - 1)
    for place in range(length, length + steps):
        logits = model(tokens[:, :-1].contiguous(), None, None, places + place - 1)
        tokens[:, place] = _chosen(logits, temperature, generator)
        if end is not None and place > length:
            tokens[:, place].masked_fill_(tokens[:, place - 1] == end, end)
    return tokens[:, length:]


@torch.no_grad()
def translate(
    model: nn.Module, source: Tensor, lengths: Tensor, *, start: int, end: int | None, steps: int
) -> Tensor:
    """What an encoder–decoder makes of sources (B, M) int64 with `lengths` (B,): (B, steps) tokens after `start`, the
    likeliest of each step; what follows `end` is `end`.

    Stops once all have ended, unless the model is sharded: its ranks must take part in each other's steps.
    """
    tokens = source.new_zeros(len(source), steps + 1)
    tokens[:, 0] = start
    places = torch.arange(len(source), device=source.device) * steps
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    together = sharded(model)
    for place in range(steps):
        logits = model(source, tokens[:, :-1].contiguous(), lengths, None, places + place)
        newest = logits.argmax(-1)
        if end is not None:
            newest = newest.where(~ended, end)
            ended |= newest == end
        tokens[:, place + 1] = newest
        if end is not None and not together and bool(ended.all()):
            tokens[:, place + 2 :] = end
            break
    return tokens[:, 1:]


def sharded(model: nn.Module) -> bool:
    """Whether other ranks hold parts of the model's weights."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits (B, V)."""
    if not temperature:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(shares, 1, generator=generator).squeeze(1)
