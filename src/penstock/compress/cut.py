"""Decides how much of each block is removed, from scores and shares: a model is pruned in cuts, one kind at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.compress.prune import (
    keep_experts,
    keep_heads,
    keep_hidden,
    keep_layers,
    with_layers,
    with_stack,
)
from penstock.compress.scores import BlockScores, Loss, expert_scores, layers_to_keep, part_scores
from penstock.config.compress import Prune
from penstock.config.graph import Run
from penstock.config.layer import Layer
from penstock.config.model import ModelConfig
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models.model import Model
from penstock.planner.rates import VECTOR

GPU_MULTIPLE = 64
"""Hidden widths on a GPU are multiples of this: tiles of matrix products in half precision are 64 and 128 wide."""


class PruneCut(NamedTuple):
    """The model after one kind of parts was removed."""

    words: str
    """Description of the removed parts."""
    model: Model


def multiple_of(options: Prune, device: torch.device) -> int:
    """Hidden widths are cut to multiples of this number."""
    return options.multiple or (GPU_MULTIPLE if device.type == "cuda" else VECTOR)


def cuts(
    model: Model, options: Prune, batches: Sequence[Any], loss: Loss, *, multiple: int
) -> Iterator[PruneCut]:
    """The model after each kind of cut: layers, experts, heads, hidden features. Each is scored on the model that
    earlier cuts have left.

    Raises ConfigError if a share would remove nothing, and as the functions of `penstock.compress.prune`.
    """
    cutter = _Cutter(options, batches, loss, multiple)
    for parts in ("layers", "experts", "heads", "hidden features"):
        option = parts.partition(" ")[0]
        for name in [run.name for run in model.graph.runs if getattr(options, option)]:
            run = model.graph.run(name)
            with_layers(model.config, run, run.stack.layers)  # raises before anything is scored
            if (smaller := getattr(cutter, f"without_{option}")(model, run)) is not model:
                counts = [f"{_count(parts, each.graph.run(name).stack):,}" for each in (model, smaller)]
                yield PruneCut(f"{name}: {parts} {' → '.join(counts)}", smaller)
                model = smaller


def _count(parts: str, stack: Stack) -> int:
    if parts in ("layers", "experts"):
        return stack.depth if parts == "layers" else stack.experts
    return sum(layer.heads if parts == "heads" else layer.perceptron.width for layer in stack.layers)


def sized(model: ModelConfig, options: Prune, *, multiple: int) -> ModelConfig:
    """The model after pruning if all blocks lose equally, for forecasts before anything is scored."""

    for name in (run.name for run in model.graph.runs):
        run = model.graph.run(name)
        stack, layers = run.stack, list[Layer]()
        for layer in stack.layers[: _left(stack.depth, options.layers)]:
            kv = layer.kv_heads if stack.positions == "alibi" else _left(layer.kv_heads, options.heads)
            width = layer.perceptron.width
            hidden = _aligned(width * (1.0 - options.hidden), width, multiple)
            layers.append(layer.resized(kv_heads=kv, hidden=hidden))
        model = with_layers(model, run, layers)
        run = model.graph.run(name)
        model = with_stack(model, run, replace(run.stack, experts=_experts_left(run.stack, options.experts)))
    return model


def _left(count: int, share: float) -> int:
    """Number of parts that remain of `count`, at least one."""
    return max(1, count - round(count * share))


def _experts_left(stack: Stack, share: float) -> int:
    """Number of experts that remain: equally many per group, and at least as many as a token visits."""
    if not stack.experts or stack.router == "given":
        return stack.experts
    groups = stack.router_groups
    least = -(-stack.experts_per_token // groups) * groups
    return max(least, groups * _left(stack.experts // groups, share))


def _aligned(wanted: float, width: int, multiple: int) -> int:
    """The multiple nearest to a wanted width; layers narrower than that keep their width."""
    return min(width, max(multiple, round(wanted / multiple) * multiple))


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Removes the parts of a run that matter least, by the shares in the options. Methods return the smaller model, or
    the same one if a share is less than one layer or expert."""

    options: Prune
    batches: Sequence[Any]
    loss: Loss
    multiple: int

    def without_layers(self, model: Model, run: Run) -> Model:
        count = _left(run.stack.depth, self.options.layers)
        if count == run.stack.depth:
            return model
        numbers = layers_to_keep(model, run.name, count, self.batches, self.loss, self.options.layers_by)
        return keep_layers(model, run.name, numbers)

    def without_experts(self, model: Model, run: Run) -> Model:
        stack, options = run.stack, self.options
        count = _experts_left(stack, options.experts)
        if count == stack.experts or not any(layer.mixture for layer in stack.layers):
            return model
        by_error = options.experts_by == "error"
        scores = expert_scores(model, run.name, self.batches, self.loss, by_error=by_error)
        size, most = stack.experts // stack.router_groups, count // stack.router_groups

        def best(row: Tensor) -> list[int]:
            groups = row.view(-1, size)
            return [size * n + number for n, group in enumerate(groups) for number in _best(group, most)]

        return keep_experts(model, run.name, [None if row is None else best(row) for row in scores])

    def without_heads(self, model: Model, run: Run) -> Model:
        stack, options, blocks = run.stack, self.options, self._scores(model, run)
        scores = [block.heads for block in blocks]
        cross_scores = [block.cross for block in blocks if block.cross is not None]
        if options.even or stack.biased:
            counts = [_left(layer.kv_heads, options.heads) for layer in stack.layers]
        else:
            ranked = [row.sort(descending=True).values for row in _comparable(scores, options)]
            for number, row in enumerate(_comparable(cross_scores, options)):
                ranked[number] = ranked[number] + row.sort(descending=True).values
            counts = _counts(ranked, options.heads, 1)
        if stack.biased:
            # Blocks share the biases of their heads, so they must keep the same heads; ALiBi is refused if heads are
            # removed.
            scores = [torch.stack(_comparable(scores, options)).sum(0)] * len(scores)
        kept, cross = (
            [_best(row, count) for row, count in zip(rows, counts)] for rows in (scores, cross_scores)
        )
        return keep_heads(model, run.name, kept, cross or None)

    def without_hidden(self, model: Model, run: Run) -> Model:
        """Each expert loses its own hidden features."""
        stack, options, blocks = run.stack, self.options, self._scores(model, run)
        if options.even:
            widths = [layer.perceptron.width for layer in stack.layers]
            counts = [_aligned(width * (1.0 - options.hidden), width, self.multiple) for width in widths]
        else:
            every = _comparable([block.hidden for block in blocks], options)
            ranked = [
                rows.sort(-1, descending=True).values.reshape(-1, rows.shape[-1]).mean(0) for rows in every
            ]
            counts = _counts(ranked, options.hidden, self.multiple)
        kept, shared = list[Tensor](), list[Tensor | None]()
        for block, count in zip(blocks, counts, strict=True):
            rows = block.hidden.reshape(-1, block.hidden.shape[-1])
            numbers = torch.tensor([_best(row, count) for row in rows])
            kept.append(numbers if block.hidden.dim() > 1 else numbers[0])
            common, most = block.shared, count * stack.shared_experts
            shared.append(None if common is None else torch.tensor(_best(common, most)))
        return keep_hidden(model, run.name, kept, shared)

    def _scores(self, model: Model, run: Run) -> list[BlockScores]:
        return part_scores(model, run.name, self.batches, self.loss, self.options.by)


def _best(scores: Tensor, count: int) -> list[int]:
    """Numbers of the highest scores, ascending."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _comparable(scores: Sequence[Tensor], options: Prune) -> list[Tensor]:
    """Scores that can be compared between blocks: Taylor scores are changes of the loss; all others are divided by the
    norm of their block's scores (Molchanov et al., ICLR 2017, section 2.2)."""
    if options.by == "taylor":
        return list(scores)
    return [block / block.norm().clamp(min=torch.finfo(block.dtype).tiny) for block in scores]


def _counts(ranked: Sequence[Tensor], share: float, multiple: int) -> list[int]:
    """Number of parts that each block keeps, if the share of all with the lowest scores is removed in pieces of
    `multiple`; the first piece of each block stays. `ranked` are the scores of each block, descending."""
    counts = [len(scores) for scores in ranked]
    wanted, removed = share * sum(counts), 0
    pieces = sorted(
        (float(scores[begin : begin + multiple].mean()), -begin, block, min(multiple, len(scores) - begin))
        for block, scores in enumerate(ranked)
        for begin in range(multiple, len(scores), multiple)
    )
    for _, _, block, size in pieces:
        if removed + size / 2 > wanted:
            break
        counts[block] -= size
        removed += size
    if removed == 0 and share:
        raise ConfigError(
            f"A share of {share:g} removes nothing of blocks of {', '.join(map(str, sorted(set(counts))))} parts in "
            f"pieces of {multiple}; raise it, or lower prune.multiple."
        )
    return counts
