"""Our models with a share of the tokens of each sample on every rank: `penstock.kernels.token_cut` cuts them.

All ranks are given whole samples, and all get the same outputs, or the same sum of losses. In between each has its own
tokens: of text from the table of embeddings to the output, of images from the first block to the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.context import Shared
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.padding import Real
from penstock.kernels.token_cut import Cut
from penstock.models.block import Context
from penstock.models.encoder import NormPooler, Pooler
from penstock.models.positions import alibi, places_of, rotations
from penstock.models.seq2seq import Seq2Seq
from penstock.models.stack import TextModel, TokenStack
from penstock.models.vit import ViT


def share_tokens(model: Any, cut: Cut) -> None:
    """Let a model compute this rank's tokens alone, in place. `cut` is that of a decoder, where there is one."""
    if isinstance(model, ViT):
        _share_patches(model, cut)
    elif isinstance(model, Seq2Seq):
        _SharedPair(model, cut)
    else:
        _SharedText(model, cut)


class _Tokens:
    """Where the tokens of this pass stand among all of their samples: what `TokenStack` takes for a past."""

    remembers = False

    def __init__(
        self,
        cut: Cut,
        like: Tensor,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        memory: _Tokens | None = None,
    ) -> None:
        self.cut, self.count, self.memory = cut, like.shape[1], memory
        self._known: dict[str, Any] = {"lengths": lengths, "documents": documents}
        places = places_of(self.count, documents, like.device)
        self.places = cut.take(places, places.dim() - 1)

    def context(self, stack: TokenStack, x: Tensor, memory: Tensor | None) -> Context:
        sizes = stack.sizes
        sight: Shared | None = None
        if memory is not None and self.memory is not None:
            memory = memory.transpose(0, 1) if stack.sequence_first else memory
            sight = self.memory.seen_by(x.shape[1])
        known = {**self._known, "biases": self._biases(stack, x.device)}
        lengths, real = self._known["lengths"], None
        if stack.padding == "remove" and lengths is not None and not stack.causal:
            mine = self.cut.places(self.cut.rank, self.count, x.device)
            real = Real.of(lengths, mine, sequence_first=stack.sequence_first)
        return Context(
            real=real,
            memory=memory,
            memory_mask=sight,
            mask=Shared(self.cut, self.count, **known),
            near=Shared(self.cut, self.count, window=sizes.window, **known),
            **rotations(sizes, self.places, sequence_first=stack.sequence_first),
        )

    def _biases(self, stack: TokenStack, device: torch.device) -> Tensor | None:
        """The values that a stack adds to scores by distance, as `Shared` takes them."""
        sizes, reach = stack.sizes, Shared(self.cut, self.count).reach

        def between(looking: int, seen: int) -> Tensor:
            if stack.relative is not None:
                found: Tensor = stack.relative(looking, seen)
                return found[0]
            return alibi(sizes.heads, looking, seen, device)[0, stack.heads]

        if not sizes.biased:
            return None
        return torch.cat([between(reach, 1)[:, :, 0].flip(1), between(1, reach)[:, 0, 1:]], dim=1)

    def seen_by(self, queries: int) -> Shared:
        """The view that `queries` tokens of another stack have of these."""
        return Shared(self.cut, self.count, lengths=self._known["lengths"], queries=queries)


class _SharedText:
    """The forward pass of a text model. A class, so that what it wraps can be copied and pickled with it."""

    def __init__(self, model: TextModel, cut: Cut) -> None:
        self.forward: Callable[..., Tensor] = model.forward
        self.signature = inspect.signature(model.forward)
        self.cut = cut
        self.tokens: _Tokens | None = None
        self.pooled = False
        model.forward = self
        for module in model.modules():
            if isinstance(module, TokenStack):
                module.forward = _SharedStack(module.forward, self)  # type: ignore[method-assign]
            elif isinstance(module, Pooler | NormPooler):
                self.pooled = True
                module.forward = _WholeFirst(module.forward, self)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self.signature.bind(*args, **kwargs).arguments
        if given.get("past") is not None:
            return self.forward(*args, **kwargs)  # a text that is continued token by token is not cut
        cut = self.cut
        targets, rows = given.get("targets"), given.get("rows")
        tokens = self._cut(given)
        mine = None
        if rows is not None:
            mine = self._rows(given, rows, tokens.shape[1], targets)
        elif targets is not None:
            given["targets"] = cut.take(targets, 1, filling=IGNORED)
        try:
            out = self.forward(**given)
        finally:
            count, self.tokens = tokens.shape[1], None
        if targets is not None:
            return cut.summed(out)
        if mine is not None:
            return cut.summed(out * mine[:, None])
        return out if self.pooled else cut.whole(out, 1, count)

    def _cut(self, given: dict[str, Any]) -> Tensor:
        """Put this rank's tokens in place of all, which are returned: those that the outputs are of."""
        tokens: Tensor = given["tokens"]
        self.tokens = _Tokens(self.cut, tokens, given.pop("lengths", None), given.pop("documents", None))
        for name in ("tokens", "segments"):
            if given.get(name) is not None:
                given[name] = self.cut.take(given[name], 1)
        return tokens

    def _rows(self, given: dict[str, Any], rows: Tensor, tokens: int, targets: Tensor | None) -> Tensor:
        """Put in place of rows of all samples those of this rank's tokens: with targets only these, which are then
        target by target, else the first token for each of the others. Returns which are this rank's.
        """
        cut = self.cut
        places = cut.places(cut.rank, tokens, rows.device)
        here = torch.full((cut.chunk(tokens) * cut.chunks,), -1, device=rows.device, dtype=torch.int64)
        here[places] = torch.arange(len(places), device=rows.device)
        found = here[rows % tokens]
        mine = found >= 0
        local = torch.where(mine, rows // tokens * len(places) + found, 0)
        if targets is None:
            given["rows"] = local
            return mine
        chosen = mine.nonzero()[:, 0]
        # One row at the least, of which no loss is asked for.
        given["rows"] = torch.cat([local[chosen], local.new_zeros(1)])
        given["targets"] = torch.cat([targets[chosen], targets.new_full((1,), IGNORED)])
        return mine


class _SharedPair(_SharedText):
    """The same of an encoder–decoder. Both sides are cut: the memory stays where the encoder has made it."""

    def _cut(self, given: dict[str, Any]) -> Tensor:
        source, target, beside = given["source"], given["target"], self.cut.unordered()
        memory = _Tokens(beside, source, given.get("lengths"))
        self.tokens = _Tokens(self.cut, target, memory=memory)
        given |= {"source": beside.take(source, 1), "target": self.cut.take(target, 1)}
        return target  # type: ignore[no-any-return]


class _SharedStack:
    """The forward pass of a stack of blocks, whose tokens stand where the model's wrapper says."""

    def __init__(self, forward: Callable[..., Tensor], around: _SharedText) -> None:
        self.forward, self.around = forward, around

    def __call__(self, x: Tensor, *args: Any, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        tokens = self.around.tokens
        if tokens is None:
            return self.forward(x, *args, memory=memory, **kwargs)
        # Of an encoder–decoder's two stacks the encoder has no memory.
        mine = tokens if memory is not None or tokens.memory is None else tokens.memory
        return self.forward(x, memory=memory, past=mine)


class _WholeFirst:
    """The forward pass of what reads all tokens of a sample."""

    def __init__(self, forward: Callable[[Tensor], Tensor], around: _SharedText) -> None:
        self.forward, self.around = forward, around

    def __call__(self, x: Tensor) -> Tensor:
        tokens = self.around.tokens
        return self.forward(x if tokens is None else self.around.cut.whole(x, 1, tokens.count))


def _share_patches(model: ViT, cut: Cut) -> None:
    tokens = model.config.tokens
    embed, read_out = model.embed, model.read_out
    model.embed = _Taken(model, embed, cut)  # type: ignore[method-assign]
    model.read_out = _Gathered(model, read_out, cut)  # type: ignore[method-assign]
    for block in model.blocks:
        attention: Any = block.attention
        attention.mix = _Mixed(attention.mix, Shared(cut, tokens))


class _Taken:
    """The layers before the blocks, whose result is cut to this rank's tokens."""

    def __init__(self, model: ViT, embed: Callable[[Tensor], Tensor], cut: Cut) -> None:
        self.stem, self.embed, self.cut = model.stem, embed, cut

    def __call__(self, images: Tensor) -> Tensor:
        return self.cut.take(self.embed(images), 0 if self.stem.sequence_first else 1)


class _Gathered:
    """The layers after the blocks, which read all tokens."""

    def __init__(self, model: ViT, read_out: Callable[[Tensor], Tensor], cut: Cut) -> None:
        self.stem, self.read_out, self.cut, self.count = model.stem, read_out, cut, model.config.tokens

    def __call__(self, x: Tensor) -> Tensor:
        return self.read_out(self.cut.whole(x, 0 if self.stem.sequence_first else 1, self.count))


class _Mixed:
    """Attention whose mask says where tokens are, for blocks that are given none."""

    def __init__(self, mix: Callable[..., Tensor], shared: Shared) -> None:
        self.mix, self.shared = mix, shared

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return self.mix(q, k, v, self.shared)
