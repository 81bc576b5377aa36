"""Context parallelism: every rank computes a part of each sample's tokens, which `kernels.token_cut` chooses. All ranks
receive whole samples, and all return the same outputs, or the same sum of losses. From the inputs to the heads each
rank has its own tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.config.graph import Graph, Head, Input, Run, TokenInput, WordHead
from penstock.errors import ConfigError
from penstock.kernels.context import Shared, SharedMemories
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.padding import Real
from penstock.kernels.token_cut import Cut
from penstock.models.embeddings import alibi, places_of, rotations
from penstock.models.inputs import Context, Inputs, shares_of
from penstock.models.stack import TokenStack


class Shares:
    """This rank's part of the tokens in one pass. Token inputs in `given`, and their segments, are replaced by this
    rank's part.
    """

    def __init__(self, cut: Cut, graph: Graph, given: Inputs) -> None:
        if given.token_weights is not None or given.prefixes is not None:
            raise ConfigError(
                "plan.cp cannot cut texts whose tokens have weights, or whose beginning is seen whole; use plan.cp=1."
            )
        self.cut, self.graph = cut, graph
        self._cuts: dict[str, Cut] = {}
        self._tokens: dict[str, _Tokens] = {}
        documents: Any = given.documents
        known: dict[str, Callable[..., _Tokens]] = {}
        for one in graph.inputs:
            if one.name not in given.tensors:
                continue
            values = given.tensors[one.name]
            runs = [run for run in graph.runs if graph.input_of(run) is one]
            causal = any(run.causal for run in runs)
            own = self._cuts[one.name] = cut if causal else cut.unordered()
            count = values.shape[1] if isinstance(one, TokenInput) else one.length
            lengths: Any = given.lengths if one.name == graph.padded else None
            known[one.name] = partial(_Tokens, own, count, values.device, lengths, documents)
            if isinstance(one, TokenInput):
                given.tensors[one.name] = own.take(values, 1)
                if given.segments is not None:
                    given.segments = own.take(given.segments, 1)
        for run in graph.runs:
            if graph.input_of(run).name in known:
                there = enumerate(self._tokens.get(name) for name in run.memories)
                memories = [(number, tokens) for number, tokens in there if tokens is not None]
                tokens_of = known[graph.input_of(run).name]
                self._tokens[run.name] = tokens_of(memories=memories, memory_index=given.memory_index)

    def cut_of(self, one: Input) -> Cut:
        """The cut of an input's tokens."""
        return self._cuts[one.name]

    def tokens(self, run: Run) -> Any:
        """The tokens of a run, in place of the `past` of a `TokenStack`."""
        return self._tokens[run.name]

    def balance(self, run: Run, counts: Tensor) -> Tensor:
        """The shares of this rank's tokens in the balance of experts, where only the first `counts` tokens of each
        sample count; see `Context.shares`. The results are averaged over the ranks."""
        tokens = self._tokens[run.name]
        return tokens.cut.take(shares_of(counts, tokens.count), 1) * tokens.cut.size

    def numbers(self, run: Run, device: torch.device) -> Tensor:
        """The indices of this rank's tokens within a sample, (n,)."""
        tokens = self._tokens[run.name]
        return tokens.cut.places(tokens.cut.rank, tokens.count, device)

    def whole(self, x: Tensor, head: Head) -> Tensor:
        """The features that a head reads, gathered from all ranks."""
        tokens = self._tokens[head.run]
        return tokens.cut.whole(x, 1, tokens.count)

    def words(
        self, model: Any, head: WordHead, x: Tensor, targets: Tensor | None, rows: Tensor | None,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        """The output of a head for words, computed on this rank's tokens and gathered: logits, or the sum of losses."""
        tokens = self._tokens[head.run]
        cut, is_local = tokens.cut, None
        if rows is not None:
            is_local, rows, targets = tokens.rows(rows, targets)
        elif targets is not None:
            targets = cut.take(targets, 1, filling=IGNORED)
        out = model.words(x, targets, smoothing, rows=rows, head=head)
        if targets is not None:
            return cut.summed(out)
        if is_local is not None:
            return cut.summed(out * is_local[:, None])
        return cut.whole(out, 1, tokens.count)


class _Tokens:
    """The positions of this rank's tokens of a run in their samples; used in place of the `past` of a `TokenStack`."""

    remembers = False

    def __init__(
        self, cut: Cut, count: int, device: torch.device, lengths: Tensor | None = None,
        documents: Tensor | None = None, memories: Sequence[tuple[int, _Tokens]] = (),
        memory_index: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.count, self.memories, self.memory_index = cut, count, memories, memory_index
        self._known: dict[str, Any] = {"lengths": lengths, "documents": documents}
        places = places_of(count, documents, device)
        self.places, self.last = cut.take(places, places.dim() - 1), places.amax(-1, keepdim=True)

    def context(self, stack: TokenStack, x: Tensor, memory: Tensor | None) -> Context:
        sizes = stack.sizes
        sight: Shared | None = None
        if memory is not None:
            memory = memory.transpose(0, 1) if stack.sequence_first else memory
            views = [(number, tokens.seen_by(x.shape[1])) for number, tokens in self.memories]
            # The tokens of a causal memory are spread over the ranks in another order.
            plain = len(views) == 1 and self.memory_index is None and not views[0][1].cut.causal
            sight = views[0][1] if plain else SharedMemories(views, self.memory_index)
        known = {**self._known, "biases": self._biases(stack, x.device)}
        lengths, real = self._known["lengths"], None
        if stack.padding == "remove" and lengths is not None and not stack.causal:
            own_places = self.cut.places(self.cut.rank, self.count, x.device)
            real = Real.of(lengths, own_places, sequence_first=stack.sequence_first)
        turns: dict[str, Any] = rotations(
            stack.turns, self.places, sequence_first=stack.sequence_first, last=self.last
        )
        return Context(
            real=real, memory=memory, memory_mask=sight, mask=Shared(self.cut, self.count, **known),
            near=Shared(self.cut, self.count, window=sizes.window, **known), **turns,
        )  # fmt: skip

    def _biases(self, stack: TokenStack, device: torch.device) -> Tensor | None:
        """The biases that a stack adds to scores by distance, in the form that `Shared` expects."""
        sizes, reach = stack.sizes, Shared(self.cut, self.count).reach

        def between(looking: int, seen: int) -> Tensor:
            if stack.relative is not None:
                biases: Tensor = stack.relative(looking, seen)
                return biases[0]
            return alibi(sizes.heads, looking, seen, device)[0, stack.heads]

        if not sizes.biased:
            return None
        return torch.cat([between(reach, 1)[:, :, 0].flip(1), between(1, reach)[:, 0, 1:]], dim=1)

    def seen_by(self, queries: int) -> Shared:
        """The mask by which `queries` tokens of another run attend to these tokens."""
        return Shared(self.cut, self.count, lengths=self._known["lengths"], queries=queries)

    def rows(self, rows: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which of `rows`, counted over whole samples, are this rank's; the same rows counted over its own tokens; and
        their targets. With targets only this rank's rows are returned; without, other ranks' rows are replaced by 0.
        """
        cut, count = self.cut, self.count
        places = cut.places(cut.rank, count, rows.device)
        here = torch.full((cut.chunk(count) * cut.chunks,), -1, device=rows.device, dtype=torch.int64)
        here[places] = torch.arange(len(places), device=rows.device)
        indices = here[rows % count]
        is_local = indices >= 0
        local = torch.where(is_local, rows // count * len(places) + indices, 0)
        if targets is None:
            return is_local, local, None
        chosen = is_local.nonzero()[:, 0]
        # At least one row, whose target is ignored.
        own = torch.cat([targets[chosen], targets.new_full((1,), IGNORED)])
        return is_local, torch.cat([local[chosen], local.new_zeros(1)]), own
