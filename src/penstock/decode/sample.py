"""Generate one token after the other for all texts of a batch: the likeliest, or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.decoding import Decoding
from penstock.decode.choose import NOTHING
from penstock.decode.engine import Engine, Request
from penstock.decode.static import Compiled
from penstock.decode.texts import ASK, Prompts, eagerly, remaining, sharded
from penstock.models.anatomy import evaluating


@torch.no_grad()
def sample(
    model: Any, prompts: Prompts, decoding: Decoding, *, ends: Sequence[int], seeds: Sequence[int | None] = (),
    compiled: Compiled | None = None,
) -> Tensor:  # fmt: skip
    """New tokens of each text, (B, steps) int64: up to the first of `ends`, exclusive, and then −1.

    `seeds` has one seed per text, if tokens are drawn. Ranks that share a model's weights must all call this with the
    same `max_tokens`; they take all steps together. The model's training mode is restored.
    """
    if not decoding.max_tokens:
        return prompts.tokens.new_empty(len(prompts), 0)
    with evaluating(model), eagerly() if compiled is None else nullcontext():
        together, steps, device = sharded(model), decoding.max_tokens, prompts.tokens.device
        engine = _filled_engine(model, prompts, decoding, ends, seeds, compiled)
        stops = None if decoding.ignore_end or not ends else torch.tensor(list(ends), device=device)
        tokens = torch.full((len(prompts), steps), NOTHING, device=device)
        rows = torch.arange(len(prompts), device=device)
        going = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(steps):
            ((_, newest),) = engine.advance()
            if stops is not None:
                going = going & ~torch.isin(newest, stops)
            tokens[rows, step] = torch.where(going, newest, NOTHING)
            asks = device.type == "cpu" or step % ASK == ASK - 1
            if stops is not None and not together and asks and step + 1 < steps:
                if not bool(going.any()):
                    break
                rows_left = remaining(going, compiled)
                if rows_left is not None:
                    engine.keep(rows_left)
                    rows, going = rows[rows_left], going[rows_left]
    return tokens


def _filled_engine(
    model: Any, prompts: Prompts, decoding: Decoding, ends: Sequence[int], seeds: Sequence[int | None],
    compiled: Compiled | None,
) -> Engine:  # fmt: skip
    """An engine with a slot for each prompt; it reads all prompts in its first step."""
    rows, most, start = prompts.rows(), prompts.tokens.shape[1], None
    routes: list[Any] = [None] * len(rows)
    if model.graph.routed and prompts.routes is not None:
        routes = prompts.routes.tolist()
    if prompts.source is not None:
        start = int(prompts.tokens[0, 0])
    engine = Engine(
        model, slots=len(rows), context=most + decoding.max_tokens, chunk=1 << 62, start=start, ends=ends,
        source=None if prompts.source is None else prompts.source.shape[1], compiled=compiled,
    )  # fmt: skip
    single = replace(decoding, best=1)
    for number, row in enumerate(rows):
        settings = replace(single, seed=seeds[number]) if decoding.draws else single
        slot = engine.admit(Request(ids=tuple(row), decoding=settings, route=routes[number]))
        assert slot == number
    return engine
