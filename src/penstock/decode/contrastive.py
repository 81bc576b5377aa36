"""Contrastive search: of the likeliest tokens, the one whose features are least like those that are there (Su et al.,
NeurIPS 2022, "A Contrastive Framework for Neural Text Generation", eq. 5).

All candidates of a step run side by side in one pass, each seeing what is there and itself. Keys and values of the one
that is chosen move to the place of the next token.

Shapes: B texts, k candidates, L tokens that are there, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.decoding import Decoding
from penstock.decode.choose import NOTHING, adjust_logits
from penstock.decode.past import Columns
from penstock.decode.texts import Generating, Prompts, Texts
from penstock.kernels.top import top


@torch.no_grad()
def contrast(model: Generating, prompts: Prompts, decoding: Decoding, *, ends: Sequence[int]) -> Tensor:
    """New tokens of each text, (B, steps) int64: up to the first of `ends`, which is left out, and then −1."""
    steps, width, device = decoding.max_tokens, decoding.top_k, prompts.tokens.device
    texts = Texts(model, prompts, steps=1, side_by_side=steps + width)
    store = texts.past.store
    assert isinstance(store, Columns)
    stops = None if decoding.ignore_end or not ends else torch.tensor(list(ends), device=device)
    rows = torch.arange(len(prompts), device=device)
    features = texts.first_features()
    earlier = F.normalize(features.float(), dim=-1)
    padding = torch.arange(earlier.shape[1], device=device) >= prompts.lengths[:, None]
    earlier = earlier.masked_fill(padding[..., None], 0.0)
    logits = model.words(features[rows, prompts.lengths - 1])
    tokens = torch.full((len(prompts), steps), NOTHING, device=device)
    going = torch.ones(len(prompts), dtype=torch.bool, device=device)
    history = prompts.history()
    for step in range(steps):
        written = torch.cat([history, tokens[:, :step]], 1)
        logits = adjust_logits(logits.float(), decoding, written, step, stops)
        shares, candidates = top(torch.softmax(logits, dim=-1), min(width, logits.shape[1]))
        begin = texts.filled
        seen = torch.ones(
            len(rows), candidates.shape[1], begin + candidates.shape[1], dtype=torch.bool, device=device
        )
        seen[:, :, : padding.shape[1]] = ~padding[:, None]
        seen[:, :, begin:] = torch.eye(candidates.shape[1], dtype=torch.bool, device=device)
        features = texts.following_features(candidates, seen)
        unit = F.normalize(features.float(), dim=-1)
        alike = (unit @ earlier.transpose(1, 2)).masked_fill(~_not_padding(earlier)[:, None], -1.0).amax(-1)
        best = ((1 - decoding.contrastive) * shares - decoding.contrastive * alike).argmax(-1)
        store.move(begin + best, begin)
        texts.filled = begin + 1
        newest = candidates[rows, best]
        if stops is not None:
            going = going & ~torch.isin(newest, stops)
        tokens[:, step] = torch.where(going, newest, NOTHING)
        if stops is not None and not bool(going.any()):
            break
        earlier = torch.cat([earlier, unit[rows, best, None]], dim=1)
        logits = model.words(features[rows, best])
    return tokens


def _not_padding(features: Tensor) -> Tensor:
    """Which of the features (B, L, D) are no padding, whose features are 0."""
    return (features != 0).any(-1)
