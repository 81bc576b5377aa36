"""A run of a model's graph: positions, blocks, and, for pre-norm blocks, a last norm.

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
from penstock.kernels.dropout import Dropout
from penstock.kernels.padding import Real, Unpadded, within
from penstock.models.block import Block, ExpertSamples, ModulatedBlock
from penstock.models.embeddings import Learned, Relative, Sinusoidal, alibi, places_of, rotations, turns_of
from penstock.models.inputs import NOTHING, Context, RunInputs
from penstock.models.masks import added, masks_of
from penstock.models.sublayers import make_norm
from penstock.models.wrap import put_around


class TokenStack(nn.Module):
    """Maps tokens (B, N, D) to features (B, N, D). If it `enters`, the tokens come from an input and get positions;
    else they are another run's output with `width` features, which a linear maps to its own width if they differ. Its
    cross attention reads `memory` features per token, by default its own width. `one` is the input whose samples it
    computes.
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
        """Whether it is the first run that computes a text."""
        self.turns, self.biased = turns_of(sizes, one), sizes.biased
        self.windows = tuple(layer.window for layer in sizes.layers)
        """Window of attention of each block, in tokens; 0 is all."""
        self.sequence_first = False
        self.padding: Padding = "keep"
        self.backend: AttentionBackend = "sdpa"
        self.outputs: list[Tensor] | None = None
        """If a list, the output at each depth is appended to it."""
        self.heads = slice(None)
        """Slice of the heads that this rank computes."""
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
        """Whether all samples have been computed at its depth once a block has run."""
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

    def forward(self, x: Tensor, given: RunInputs = NOTHING) -> Tensor:
        """The features of tokens (B, N, D); `given` describes their samples."""
        x, places = self._enter(x, given)
        shape, unpadded = x.shape[:2], self._unpadded(x, given)
        if unpadded is not None:
            x, places, given = unpadded.real.take(x), unpadded.places, given._replace(lengths=None)
        context = self._context(x, places, shape[1], given, unpadded)
        x = x.transpose(0, 1) if self.sequence_first else x
        if self._removes_padding(given):
            counted, lengths = torch.arange(shape[1], device=x.device), given.lengths
            real = Real.of(lengths, counted, sequence_first=self.sequence_first)  # type: ignore[arg-type]
            context = context._replace(real=real)
        x = x if context.real is None else context.real.take(x)
        if self.sizes.experts:
            context = self._with_routing(context, x, shape, given, unpadded)
        if given.condition is not None:
            context = context._replace(condition=given.condition.unsqueeze(0 if self.sequence_first else 1))
        for block, deepens in zip(self.blocks, self.deepens):
            x = block(x, context)
            if self.outputs is not None and deepens:
                self.outputs.append(x)
        x = x if self.norm is None else self.norm(x)
        x = x if context.real is None else context.real.put(x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return x if unpadded is None else unpadded.real.put(x)

    def _enter(self, x: Tensor, given: RunInputs) -> tuple[Tensor, Tensor]:
        """The tokens that enter the first block, and their positions."""
        x = x if self.bridge is None else self.bridge(x)
        past, documents = given.past, given.documents
        places = places_of(x.shape[1], documents, x.device) if past is None else past.places
        if isinstance(self.places, Learned):
            x = x + self.places(x.shape[1] if past is None and documents is None else places)
        elif self.places is not None:
            x = x + self.places(places).to(x.dtype)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return x if self.dropout is None else self.dropout(x), places

    def _removes_padding(self, given: RunInputs) -> bool:
        """Whether padding is skipped: only without a causal mask, and in samples of one input."""
        removes = self.padding == "remove" and given.lengths is not None and len(given.batches) < 2
        return removes and not self._is_causal(given)

    def _is_causal(self, given: RunInputs) -> bool:
        return all(hides for _, hides in given.batches) if given.batches else self.causal

    def _unpadded(self, x: Tensor, given: RunInputs) -> Unpadded | None:
        """The non-padding tokens, concatenated over samples, if attention can compute them in this form."""
        if given.documents is not None or given.past is not None or not self._removes_padding(given):
            return None
        dtype, varlen = type_of_scores(x), self._knows_lengths(x)
        unpadded: Unpadded | None = Unpadded.of(given.lengths, x.shape[1], dtype, varlen=varlen)
        return unpadded

    def _with_routing(
        self, context: Context, x: Tensor, shape: torch.Size, given: RunInputs, unpadded: Unpadded | None
    ) -> Context:
        """Add to the context the values by which experts are chosen, for the tokens x, originally of `shape` (B, N)."""
        sizes, routes = self.sizes, given.routes
        if sizes.experts_in == "block":
            return context._replace(samples_of=_samples_of(sizes, routes))
        swapped, real = (self.sequence_first, context.real) if unpadded is None else (False, unpadded.real)

        def held(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            value = value.t() if swapped else value
            return value if real is None else value.flatten()[real.rows][None]

        return context._replace(
            shares=held(given.shares), places=held(given.order),
            routes=held(None if routes is None else routes[:, None].expand(shape)),
            samples=held(_samples(x, shape, given.documents)) if sizes.chooses_by_sample else None,
        )  # fmt: skip

    def _beside(self, context: Context, memory: Tensor, given: RunInputs, x: Tensor) -> Context:
        """Add to the context the memory that cross attention of x reads."""
        lengths, dtype = given.memory_lengths, type_of_scores(x)
        mask: Tensor | AttentionMask | None = added(given.memory_seen, dtype)
        if lengths is not None:
            unpadded = None
            if self.padding == "remove":
                unpadded = Unpadded.of(lengths, memory.shape[1], dtype, varlen=self._knows_lengths(x))
            if unpadded is None:
                mask = added(within(lengths, memory.shape[1]), dtype)
            else:
                memory, mask = unpadded.real.take(memory), unpadded
        memory = memory.transpose(0, 1) if self.sequence_first else memory
        return context._replace(memory=memory, memory_mask=mask)

    def _knows_lengths(self, x: Tensor) -> bool:
        """Whether attention of x uses a kernel for variable lengths."""
        drops, dtype = self.training and self.sizes.weights_dropout > 0, format_of(type_of_scores(x))
        biased = self.biased or self.sizes.sinks or self.sizes.score_cap is not None
        return knows_lengths(self.backend, x.device.type, dtype, dropout=drops, biased=biased)

    def _context(
        self, x: Tensor, places: Tensor, tokens: int, given: RunInputs, unpadded: Unpadded | None
    ) -> Context:
        """The inputs of the blocks besides x; samples have at most `tokens` tokens."""
        if given.past is not None:
            if given.memory_seen is not None:
                given.past.see(given.memory_seen)
            return given.past.context(self, x, given.memory)
        sizes, causal = self.sizes, self._is_causal(given)
        turns: dict[str, Any] = rotations(self.turns, places, sequence_first=self.sequence_first)
        bias = None
        if self.relative is not None:
            bias = self.relative(tokens, tokens)
        elif sizes.positions == "alibi":
            bias = alibi(sizes.heads, tokens, tokens, x.device)[:, self.heads]

        described = (given.lengths, given.prefixes, given.documents, unpadded, bias)
        mask = near = None  # the kernel's own causal mask, or none, is enough
        if any(self.windows) or len(given.batches) > 1 or any(one is not None for one in described):
            mask, near = masks_of(
                self.windows, sizes.window, tokens, given, unpadded or given.documents, bias, causal=causal,
                varlen=self._knows_lengths(x), samples=x.shape[0], device=x.device, dtype=type_of_scores(x),
            )  # fmt: skip
        context = Context(mask=mask, near=near, causal=causal if given.batches else None, **turns)
        return context if given.memory is None else self._beside(context, given.memory, given, x)


def _samples(x: Tensor, shape: torch.Size, documents: Tensor | None) -> Tensor:
    """The index of the sample, or of the document in it, of each token of `shape` (B, N), in rising order."""
    starts = torch.ones(shape, dtype=torch.int64, device=x.device)
    starts[:, 1:] = 0 if documents is None else documents[:, 1:] != documents[:, :-1]
    return starts.flatten().cumsum(0).view(shape) - 1


def _samples_of(sizes: Stack, routes: Tensor | None) -> tuple[Tensor, ...]:
    """The samples that routes (B,) send to each expert, in ascending order. On a GPU this synchronises, to know their
    number. Raises ConfigError without routes, and for routes to no expert."""
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
