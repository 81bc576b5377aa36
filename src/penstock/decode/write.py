"""Texts that are written from a memory of any kind, the likeliest token each time, behind beginnings of any length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.decode.choose import NOTHING
from penstock.decode.texts import Generating, Prompts, Texts, eagerly, sharded


@torch.no_grad()
def write(model: Generating, prompts: Prompts, steps: int, *, ends: Sequence[int]) -> Tensor:
    """New tokens of each text, (B, steps) int64: up to the first of `ends`, which is left out, and then −1. Ranks that
    share a model's weights must all call this with as many `steps`. The model is left in the mode it was found in."""
    training, together, device = model.training, sharded(model), prompts.tokens.device
    model.eval()
    try:
        with eagerly():
            texts = Texts(model, prompts, steps=steps, side_by_side=1)
            rows, longest = prompts.tokens.shape
            seen = torch.ones(rows, 1, longest + steps, dtype=torch.bool, device=device)
            seen[:, 0, :longest] = torch.arange(longest, device=device) < prompts.lengths[:, None]
            stops = torch.tensor(list(ends), dtype=torch.int64, device=device)
            tokens = torch.full((rows, steps), NOTHING, device=device)
            going = torch.ones(rows, dtype=torch.bool, device=device)
            logits = texts.first()
            for step in range(steps):
                newest = logits.argmax(-1)
                going = going & ~torch.isin(newest, stops)
                tokens[:, step] = newest.where(going, NOTHING)
                if step + 1 == steps or not (together or bool(going.any())):
                    break
                logits = texts.following(newest[:, None], seen)
            return tokens
    finally:
        model.train(training)
