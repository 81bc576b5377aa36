"""A stack of blocks over embedded tokens, as decoders, encoders and both sides of an encoder–decoder have it.

Shapes: B samples, N tokens, M tokens of the memory, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.model import DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.plan import LOSS_BUDGET, AttentionBackend, LossForm, Padding
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.kernels.attention import Sight, autocasts, type_of_scores
from penstock.kernels.documents import Documents
from penstock.kernels.dropout import Dropout
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.padding import Real, Unpadded
from penstock.kernels.split_linear import linear_apart
from penstock.kernels.varlen import Varlen, serves
from penstock.kernels.vocabulary import Share
from penstock.kernels.windows import Windows
from penstock.models.base import Switched, Undrawn
from penstock.models.block import Attention, Block, Context, CrossAttention, Past, make_norm
from penstock.models.positions import (
    Learned,
    Relative,
    Sinusoidal,
    added,
    alibi,
    biased,
    places_of,
    rotations,
    visible,
    within,
)

TextConfig = DecoderConfig | EncoderConfig | Seq2SeqConfig


class TokenStack(nn.Module):
    """Embedded tokens (B, N, D) to features (B, N, D): positions, blocks, and where norms come first, a last norm.

    `causal` stacks see earlier tokens only; those with `cross` attend to a memory besides.
    """

    def __init__(
        self, config: TextConfig, sizes: Stack, *, causal: bool, cross: bool = False, **where: Any
    ) -> None:
        super().__init__()
        self.sizes, self.causal = sizes, causal
        self.windows = tuple(layer.window for layer in sizes.layers)
        """Tokens that a token of each block attends to; 0 is all."""
        self.sequence_first = False
        self.padding: Padding = "keep"
        self.backend: AttentionBackend = "sdpa"
        self.heads = slice(None)
        """Slice of all heads that is computed here."""
        self.places: Learned | Sinusoidal | None = None
        if sizes.positions == "learned":
            self.places = Learned(config.max_positions or config.sequence, sizes.width, **where)
        elif sizes.positions == "sinusoidal":
            self.places = Sinusoidal(sizes.width)
        self.relative = Relative(sizes, causal=causal, **where) if sizes.positions == "relative" else None
        self.embedding_norm = make_norm(sizes, sizes.width, **where) if config.embedding_norm else None
        self.dropout = Dropout(sizes.dropout) if sizes.dropout else None
        self.blocks = nn.ModuleList(
            Block(sizes, layer, causal=causal, cross=cross, **where) for layer in sizes.layers
        )
        self.norm = make_norm(sizes, sizes.width, **where) if sizes.norm_first else None

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """With a `past`, the tokens follow those whose keys and values it keeps, and it says where they stand."""
        places = places_of(x.shape[1], documents, x.device) if past is None else past.places
        tokens, unpadded = x.shape[1], None
        if self.places is not None:
            x = x + self.places(places).to(x.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.dropout is not None:
            x = self.dropout(x)
        removes = self.padding == "remove" and lengths is not None and not self.causal
        if removes and documents is None and past is None:
            unpadded = Unpadded.of(lengths, tokens, type_of_scores(x), varlen=self._knows_lengths(x))
        if unpadded is not None:
            x, places, lengths = unpadded.real.take(x), unpadded.places, None
        if past is None:
            context = self._context(x, places, tokens, lengths, unpadded or documents)
            if memory is not None:
                context = self._beside(context, memory, memory_lengths, x)
        else:
            context = past.context(self, x, memory)
        x = x.transpose(0, 1) if self.sequence_first else x
        if removes and lengths is not None:
            counted = torch.arange(tokens, device=x.device)
            real = Real.of(lengths, counted, sequence_first=self.sequence_first)
            context = context._replace(real=real)
        x = x if context.real is None else context.real.take(x)
        for block in self.blocks:
            x = block(x, context)
        x = x if self.norm is None else self.norm(x)
        x = x if context.real is None else context.real.put(x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return x if unpadded is None else unpadded.real.put(x)

    def _beside(self, context: Context, memory: Tensor, lengths: Tensor | None, x: Tensor) -> Context:
        """The context with the memory that cross attention of x reads."""
        mask: Tensor | Sight | None = None
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
        sizes = self.sizes
        plain = not sizes.biased and not (self.training and sizes.weights_dropout)
        return plain and serves(self.backend, x.device, type_of_scores(x))

    def _context(
        self,
        x: Tensor,
        places: Tensor,
        tokens: int,
        lengths: Tensor | None,
        documents: Tensor | Unpadded | None,
    ) -> Context:
        """`tokens` are those of the longest sample."""
        sizes = self.sizes
        turns: dict[str, Any] = rotations(sizes, places, sequence_first=self.sequence_first)
        bias = None
        if self.relative is not None:
            bias = self.relative(tokens, tokens)
        elif sizes.positions == "alibi":
            bias = alibi(sizes.heads, tokens, tokens, x.device)[:, self.heads]

        known: dict[str, Any] = {
            "varlen": self._knows_lengths(x),
            "samples": x.shape[0],
            "device": x.device,
            "dtype": type_of_scores(x),
            "lengths": lengths,
        }
        return Context(
            mask=self._sight(tokens, None, bias, documents, **known) if 0 in self.windows else None,
            near=self._sight(tokens, sizes.window, bias, documents, **known) if any(self.windows) else None,
            **turns,
        )

    def _sight(
        self,
        tokens: int,
        window: int | None,
        bias: Tensor | None,
        documents: Tensor | Unpadded | None = None,
        *,
        dtype: torch.dtype,
        varlen: bool = False,
        **known: Any,
    ) -> Tensor | Sight | None:
        """Which tokens see which, in the form that takes the least memory here."""
        causal = self.causal
        if varlen and isinstance(documents, Unpadded):
            return Varlen(*documents.starts(rest=True), causal=causal, window=window)
        if varlen and known["lengths"] is None and (documents is not None or window is not None):
            where = {name: known[name] for name in ("samples", "device")}
            alone: Varlen = Varlen.of(documents, tokens=tokens, causal=causal, window=window, **where)
            return alone
        if documents is not None and (causal or known["lengths"] is None):

            def within_one(length: int) -> Tensor | Sight | None:
                inside = None if bias is None else bias[..., :length, :length]
                alone = {**known, "samples": 1, "lengths": None}
                return self._sight(length, window, inside, dtype=dtype, **alone)

            more = window is not None or bias is not None
            found: Documents | None = Documents.of(
                documents, causal=causal, mask=within_one if more else None
            )
            if found is not None:
                return found
        assert not isinstance(documents, Unpadded)  # of which there are documents
        if window is not None and bias is None:
            near = Windows.of(window, causal=causal, tokens=tokens, documents=documents, dtype=dtype, **known)
            if near is not None:
                return near
        device, lengths = known["device"], known["lengths"]
        seen = visible(tokens, device, causal=causal, window=window, lengths=lengths, documents=documents)
        return added(seen if bias is None else biased(bias, seen, causal=causal), dtype)


class Vocabulary(nn.Linear):
    """Features (…, D) to logits over the vocabulary (…, V); given targets (…), to the sum of their losses, 0-d."""

    chunked = False
    """Whether logits of which only the loss is asked for are made for some rows at a time."""
    tied = False
    """Whether the weight is the table that embeds tokens, too."""
    share: Share | None = None
    """The entries of the vocabulary whose weights lie here, where ranks share them out."""

    def forward(self, x: Tensor, targets: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
        # Of a table that embeds tokens too, two gradients are added.
        added = self.tied and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        linear = linear_apart if added and not autocasts(x) else F.linear
        if targets is None:
            return linear(x, self.weight, self.bias)
        budget = LOSS_BUDGET["cuda" if x.is_cuda else "cpu"] if self.chunked else None
        return linear_cross_entropy(
            x,
            self.weight,
            self.bias,
            targets,
            smoothing=smoothing,
            budget=budget,
            share=self.share,
            linear=linear,
        )


class TextModel(Switched):
    """The base of decoders, encoders and encoder–decoders: the table of tokens, the loss, and how weights are drawn.

    A forward pass that is given `targets`, int64, of which −100 counts nothing, returns the sum of −log p over them,
    0-d in fp32, with `smoothing` for that of labels, as `penstock.kernels.linear_cross_entropy` makes it. `rows` (M,)
    are numbers of tokens, counted through all samples (B·N): only these reach the head, so that logits are (M, V) and
    targets (M,).

    With `device="meta"` nothing is allocated or computed. Then call `to_empty(device=…)` and `init_weights()`.
    """

    tokens: nn.Embedding
    head: nn.Linear | None

    def set_padding(self, padding: Padding) -> None:
        """Choose whether tokens of padding are computed; what is read of results stays as it is."""
        for module in self.modules():
            if isinstance(module, TokenStack):
                module.padding = padding

    def set_loss(self, form: LossForm) -> None:
        """Choose how the loss is made of targets; results stay as they are."""
        for module in self.modules():
            if isinstance(module, Vocabulary):
                module.chunked = form == "chunked"

    def __init__(
        self,
        config: TextConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        with Undrawn():
            self._build(device=device, dtype=dtype)
        self.init_weights()

    def _build(self, **where: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def chosen(x: Tensor, rows: Tensor | None) -> Tensor:
        """Features (B, N, D), or those of some tokens, (M, D)."""
        return x if rows is None else x.flatten(0, 1).index_select(0, rows)

    @property
    def _width(self) -> int:
        config = self.config
        return config.encoder.width if isinstance(config, Seq2SeqConfig) else config.width

    def _make_head(self, **where: Any) -> nn.Linear:
        config = self.config
        return Vocabulary(self._width, config.vocabulary, bias=config.output_bias, **where)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token numbers (B, N) to vectors (B, N, D)."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ConfigError(
                f"The model takes token numbers of shape (batch, tokens), but was given {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}."
            )
        x: Tensor = self.tokens(tokens)
        return x * self._width**0.5 if self.config.scale_embeddings else x

    def words(self, x: Tensor, targets: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
        """Features (…, D) to logits over the vocabulary (…, V), or to the summed loss of targets (…)."""
        assert self.head is not None
        x = x * self._width**-0.5 if self.config.scale_outputs else x
        return self.head(x) if targets is None else self.head(x, targets, smoothing)  # type: ignore[no-any-return]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights, as `config.init` says: biases 0, norms 1."""
        if self.config.tied and self.head is not None and self._gives_words:
            self.head.weight = self.tokens.weight
            if isinstance(self.head, Vocabulary):
                self.head.tied = True
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if module.weight is not self.tokens.weight:
                    self._draw(name, module)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self._embedding_deviation(module))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    _gives_words = True
    """Whether the head gives words, so that it can be the table of tokens."""

    def _embedding_deviation(self, table: nn.Embedding) -> float:
        if self.config.init == "fan_in":
            return 1.0 if table is self.tokens else self._width**-0.5
        return self._width**-0.5 if self.config.init == "xavier" and table is self.tokens else 0.02

    def _draw(self, name: str, module: nn.Linear) -> None:
        init, inside = self.config.init, name.rpartition(".")[2]
        if init == "xavier":
            nn.init.xavier_uniform_(module.weight)
            return
        deviation = module.in_features**-0.5 if init == "fan_in" else 0.02
        if init == "scaled" and inside in ("out", "down"):
            deviation /= (2 * sum(isinstance(m, Block) for m in self.modules())) ** 0.5
        nn.init.normal_(module.weight, std=deviation)
        if init == "fan_in" and inside in ("q", "qkv"):
            # T5 leaves scores unscaled, and draws queries so much smaller instead.
            attention = self.get_submodule(name.rpartition(".")[0])
            assert isinstance(attention, Attention | CrossAttention)
            rows, features = module.weight, attention.head_width
            if isinstance(attention, Attention):
                groups = rows.view(-1, attention.shared + 2, features, rows.shape[1])
                rows = groups[:, : attention.shared]
            rows.mul_(features**-0.5)
