"""A run of a model's graph: positions, blocks, and where norms come first, a last norm.

Shapes: B samples, N tokens, M tokens of the memory, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.graph import Input, PatchInput, Run
from penstock.config.plan import AttentionBackend, Padding
from penstock.config.stack import Stack
from penstock.dtypes import format_of
from penstock.errors import ConfigError
from penstock.kernels.attention import AttentionMask, type_of_scores
from penstock.kernels.choices import knows_lengths
from penstock.kernels.documents import AlikeSamples, Batches, Documents
from penstock.kernels.dropout import Dropout
from penstock.kernels.padding import Real, Unpadded
from penstock.kernels.varlen import Varlen
from penstock.kernels.windows import Windows
from penstock.models.attention import make_norm
from penstock.models.block import Block, ExpertSamples, ModulatedBlock
from penstock.models.inputs import Context, TokenCache
from penstock.models.positions import (
    Learned,
    Relative,
    Sinusoidal,
    added,
    alibi,
    biased,
    is_real,
    places_of,
    rotations,
    turns_of,
    visible,
    within,
)
from penstock.models.wrap import put_around


class TokenStack(nn.Module):
    """The vectors of tokens (B, N, D) to features (B, N, D).

    Where it `enters`, the vectors come from an input and get positions; else they are what another run made, of `width`
    features, which a linear maps to its own where these are others. Its cross attention reads `memory` features of a
    token, by default as many as it has. `one` is the input whose samples it computes.
    """

    def __init__(
        self, run: Run, *, enters: bool = True, width: int | None = None, memory: int = 0,
        one: Input | None = None, **where: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes, causal = run.stack, run.causal
        self.bridge: nn.Linear | None = None
        if width not in (None, sizes.width):
            self.bridge = nn.Linear(width, sizes.width, bias=sizes.bias, **where)
        self.sizes, self.causal, self.crosses = sizes, causal, bool(run.memories)
        self.begins = True
        """Whether it is the first that a text goes through."""
        self.turns = turns_of(sizes, one)
        self.windows = tuple(layer.window for layer in sizes.layers)
        """Tokens that a token of each block attends to; 0 is all."""
        self.sequence_first = False
        self.padding: Padding = "keep"
        self.backend: AttentionBackend = "sdpa"
        self.outputs: list[Tensor] | None = None
        """Where the outputs at each depth are put, for one who looks at them; none: nowhere."""
        self.heads = slice(None)
        """Slice of all heads that is computed here."""
        unplaced = (
            (one.learned_tokens - one.registers, one.registers) if isinstance(one, PatchInput) else (0, 0)
        )
        self.places: Learned | Sinusoidal | None = None
        if enters and sizes.positions == "learned":
            self.places = Learned(run.rows, sizes.width, unplaced, **where)
        elif enters and sizes.positions in ("sinusoidal", "fairseq"):
            self.places = Sinusoidal(sizes.width, fairseq=sizes.positions == "fairseq")
        self.relative = Relative(sizes, causal=causal, **where) if sizes.positions == "relative" else None
        self.embedding_norm = make_norm(sizes.norm_kind, sizes.width, **where) if run.embedding_norm else None
        self.dropout = Dropout(sizes.dropout) if enters and sizes.dropout else None
        self.deepens = tuple(expert in (None, sizes.experts - 1) for expert in sizes.experts_of_blocks)
        """Whether all samples have gone through a block at its depth once it has run."""
        self.blocks = nn.ModuleList()
        for i, (layer, expert) in enumerate(zip(sizes.layers, sizes.experts_of_blocks)):
            depth = sum(self.deepens[:i])
            rate = sizes.drop_path * depth / max(sizes.depth - 1, 1) if sizes.drop_path else None
            cross = (memory or sizes.width) if run.memories else 0
            kind = ModulatedBlock if run.modulated else Block
            block = kind(sizes, layer, rate, causal=causal, cross=cross, **where)
            if expert is not None:
                put_around(block, ExpertSamples(block, expert))
            self.blocks.append(block)
        self.norm = (
            make_norm(sizes.norm_kind, sizes.width, **where) if sizes.norm_first and run.last_norm else None
        )

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, documents: Tensor | None = None,
        prefixes: Tensor | None = None, memory: Tensor | None = None, memory_lengths: Tensor | None = None,
        memory_seen: Tensor | None = None, past: TokenCache | None = None, shares: Tensor | None = None,
        routes: Tensor | None = None, condition: Tensor | None = None,
        batches: tuple[tuple[int, bool], ...] = (), order: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`lengths` (B,) are how many tokens of each sample are no padding, which comes last, `memory_lengths` those of
        the memory; of several memories `memory_seen` (B, 1, 1, M) says which tokens are none. With a `past`, the tokens
        follow those whose keys and values it keeps, and it says where they stand. `shares` (B, N) are as in `Context`,
        `routes` (B,) the expert of each sample, or its group of experts, where they are given. `condition` (B, D)
        modulates the blocks of a run that is modulated. `batches` are how many consecutive samples there are of each
        input, and whether they are causal; none: all samples are as the run is. `order` (B, N) are the places of
        `Context`. Under a causal mask, the first `prefixes` (B,) tokens of a sample see each other.
        """
        causal = all(hides for _, hides in batches) if batches else self.causal
        x = x if self.bridge is None else self.bridge(x)
        mixed = {"shares": shares, "routes": None if routes is None else routes[:, None].expand(x.shape[:2])}
        mixed["samples"] = _samples(x, documents) if self.sizes.chooses_by_sample else None
        mixed["places"] = order
        places = places_of(x.shape[1], documents, x.device) if past is None else past.places
        tokens, unpadded = x.shape[1], None
        if self.places is not None:
            plain = past is None and documents is None and isinstance(self.places, Learned)
            position = self.places(tokens if plain else places)
            x = x + (position if isinstance(self.places, Learned) else position.to(x.dtype))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.dropout is not None:
            x = self.dropout(x)
        removes = self.padding == "remove" and lengths is not None and not causal and len(batches) < 2
        if removes and documents is None and past is None:
            unpadded = Unpadded.of(lengths, tokens, type_of_scores(x), varlen=self._knows_lengths(x))
        if unpadded is not None:
            x, places, lengths = unpadded.real.take(x), unpadded.places, None
            mixed = {name: _rows(value, unpadded.real) for name, value in mixed.items()}
        if past is None:
            packed = unpadded or documents
            context = self._context(x, places, tokens, lengths, packed, prefixes, causal, batches)
            if memory is not None:
                context = self._beside(context, memory, memory_lengths, memory_seen, x)
        else:
            if memory_seen is not None:
                past.see(memory_seen)
            context = past.context(self, x, memory)
        x = x.transpose(0, 1) if self.sequence_first else x
        if removes and lengths is not None:
            counted = torch.arange(tokens, device=x.device)
            real = Real.of(lengths, counted, sequence_first=self.sequence_first)
            context = context._replace(real=real)
        if self.sequence_first and unpadded is None:
            mixed = {name: None if value is None else value.t() for name, value in mixed.items()}
        if context.real is not None:
            x = context.real.take(x)
            mixed = {name: _rows(value, context.real) for name, value in mixed.items()}
        more: dict[str, Any] = mixed
        if self.sizes.experts_in == "block":
            more["samples_of"] = _samples_of(self.sizes, routes)
        if condition is not None:
            more["condition"] = condition.unsqueeze(0 if self.sequence_first else 1)
        context = context._replace(**more)
        for block, deepens in zip(self.blocks, self.deepens):
            x = block(x, context)
            if self.outputs is not None and deepens:
                self.outputs.append(x)
        x = x if self.norm is None else self.norm(x)
        x = x if context.real is None else context.real.put(x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return x if unpadded is None else unpadded.real.put(x)

    def _beside(
        self, context: Context, memory: Tensor, lengths: Tensor | None, seen: Tensor | None, x: Tensor
    ) -> Context:
        """The context with the memory that cross attention of x reads."""
        mask: Tensor | AttentionMask | None = added(seen, type_of_scores(x))
        if lengths is not None:
            dtype, unpadded = type_of_scores(x), None
            if self.padding == "remove":
                unpadded = Unpadded.of(lengths, memory.shape[1], dtype, varlen=self._knows_lengths(x))
            if unpadded is None:
                mask = added(within(lengths, memory.shape[1]), dtype)
            else:
                memory, mask = unpadded.real.take(memory), unpadded
        memory = memory.transpose(0, 1) if self.sequence_first else memory
        return context._replace(memory=memory, memory_mask=mask)

    def _knows_lengths(self, x: Tensor) -> bool:
        """Whether attention of x goes through a kernel of variable lengths."""
        drops, dtype = self.training and self.sizes.weights_dropout > 0, format_of(type_of_scores(x))
        biased = self.sizes.biased or self.sizes.sinks or self.sizes.score_cap is not None
        return knows_lengths(self.backend, x.device.type, dtype, dropout=drops, biased=biased)

    def _context(
        self, x: Tensor, places: Tensor, tokens: int, lengths: Tensor | None,
        documents: Tensor | Unpadded | None, prefixes: Tensor | None, causal: bool,
        batches: tuple[tuple[int, bool], ...],
    ) -> Context:  # fmt: skip
        """`tokens` are those of the longest sample; for `causal` and `batches` see `forward`."""
        sizes = self.sizes
        turns: dict[str, Any] = rotations(self.turns, places, sequence_first=self.sequence_first)
        bias = None
        if self.relative is not None:
            bias = self.relative(tokens, tokens)
        elif sizes.positions == "alibi":
            bias = alibi(sizes.heads, tokens, tokens, x.device)[:, self.heads]

        known: dict[str, Any] = {
            "varlen": self._knows_lengths(x), "samples": x.shape[0], "device": x.device,
            "dtype": type_of_scores(x), "lengths": lengths, "prefixes": prefixes,
        }  # fmt: skip

        def seen(window: int | None) -> Tensor | AttentionMask | None:
            if len(batches) < 2:
                return self._sight(tokens, window, bias, documents, causal=causal, **known)
            assert not isinstance(documents, Unpadded)
            sights, first = [], 0
            for samples, hides in batches:
                some = slice(first, first + samples)
                first += samples
                own = None if lengths is None or hides else lengths[some]
                inside = None if documents is None else documents[some]
                alone = {**known, "samples": samples, "lengths": own}
                alone["prefixes"] = None if prefixes is None or not hides else prefixes[some]
                sights.append(
                    AlikeSamples(
                        samples, hides, self._sight(tokens, window, bias, inside, causal=hides, **alone)
                    )
                )
            return Batches(sights)

        return Context(
            mask=seen(None) if 0 in self.windows else None,
            near=seen(sizes.window) if any(self.windows) else None, causal=causal if batches else None, **turns,
        )  # fmt: skip

    def _sight(
        self, tokens: int, window: int | None, bias: Tensor | None, documents: Tensor | Unpadded | None = None,
        *, causal: bool, dtype: torch.dtype, varlen: bool = False, prefixes: Tensor | None = None, **known: Any,
    ) -> Tensor | AttentionMask | None:  # fmt: skip
        """Which tokens see which, in the form that takes the least memory here."""
        if prefixes is not None:
            assert not isinstance(documents, Unpadded)  # whose tokens have no order
            given = {"lengths": known["lengths"], "documents": documents, "prefixes": prefixes}
            mask = visible(tokens, known["device"], causal=causal, window=window, **given)
            return added(mask if bias is None else biased(bias, mask, causal=causal), dtype)
        if varlen and isinstance(documents, Unpadded):
            return Varlen(*documents.starts(rest=True), causal=causal, window=window)
        if varlen and known["lengths"] is None and (documents is not None or window is not None):
            where = {name: known[name] for name in ("samples", "device")}
            alone: Varlen = Varlen.of(documents, tokens=tokens, causal=causal, window=window, **where)
            return alone
        if documents is not None and (causal or known["lengths"] is None):

            def within_one(length: int) -> Tensor | AttentionMask | None:
                inside = None if bias is None else bias[..., :length, :length]
                alone = {**known, "samples": 1, "lengths": None}
                return self._sight(length, window, inside, causal=causal, dtype=dtype, **alone)

            more = window is not None or bias is not None
            separate: Documents | None = Documents.of(
                documents, causal=causal, mask=within_one if more else None
            )
            if separate is not None:
                return separate
        assert not isinstance(documents, Unpadded)  # of which there are documents
        if window is not None and bias is None and not torch.compiler.is_exporting():
            near = Windows.of(window, causal=causal, tokens=tokens, documents=documents, dtype=dtype, **known)
            if near is not None:
                return near
        device, lengths = known["device"], known["lengths"]
        seen = visible(tokens, device, causal=causal, window=window, lengths=lengths, documents=documents)
        return added(seen if bias is None else biased(bias, seen, causal=causal), dtype)


def shares_of(counts: Tensor, tokens: int) -> Tensor:
    """Shares (B, N) that add up to 1 / B over the first `counts` tokens of each sample; see `Context.shares`."""
    return is_real(counts, tokens).double() / (len(counts) * counts.clamp(min=1))[:, None]


def _samples(x: Tensor, documents: Tensor | None) -> Tensor:
    """The number of the sample, or of the document in it, that each token of x (B, N, D) is of: (B, N), rising."""
    starts = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
    starts[:, 1:] = 0 if documents is None else documents[:, 1:] != documents[:, :-1]
    return starts.flatten().cumsum(0).view(starts.shape) - 1


def _samples_of(sizes: Stack, routes: Tensor | None) -> tuple[Tensor, ...]:
    """The samples that go to each expert by routes (B,), in ascending order. On a GPU this waits to know how many.
    Raises ConfigError without routes, and for those of no expert."""
    labels = sizes.labels or sizes.experts
    if routes is None or (len(routes) and not 0 <= int(routes.min()) <= int(routes.max()) < labels):
        raise ConfigError(
            "This model's experts are given for each sample; pass it routes, the number of an expert, from 0 to "
            f"{labels - 1}, for each."
        )
    given = routes if not sizes.expert_of else routes.new_tensor(sizes.expert_of)[routes]
    samples: tuple[Tensor, ...] = torch.split(
        given.argsort(stable=True), given.bincount(minlength=sizes.experts).tolist()
    )
    return samples


def _rows(value: Tensor | None, real: Real) -> Tensor | None:
    """Values of tokens, in the order in which blocks hold them, of those that are computed: (1, T)."""
    return None if value is None else value.flatten()[real.rows][None]
