"""The model of a graph: every family of ours is one class.

Shapes: B samples, N tokens, M tokens of a memory, D width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.graph import (
    ClassHead,
    FeatureHead,
    Graph,
    Head,
    Input,
    PatchInput,
    PixelHead,
    Run,
    TokenInput,
    VectorHead,
    WordHead,
    part_of,
)
from penstock.config.model import ModelConfig
from penstock.config.plan import AttentionBackend, ExpertProducts, LossForm, Padding, TokenOrder
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS
from penstock.kernels.token_cut import Cut
from penstock.models.block import modulate
from penstock.models.context import Shares
from penstock.models.draw import Undrawn, draw_weights
from penstock.models.embeddings import ConvStem, PatchStem, images_of
from penstock.models.expert_linear import ExpertLinear
from penstock.models.heads import Conditioner, Vocabulary, parts_of_head
from penstock.models.inputs import (
    Described,
    Inputs,
    RunInputs,
    TokenCache,
    balance_of,
    for_head,
    lengths_of,
    mean_of,
    memory_of,
    same_length,
    samples_of,
    texts_of,
)
from penstock.models.stack import TokenStack


class Model(nn.Module):
    """The model of `config.graph`: from its inputs to the output of its head, or of several heads to a mapping of
    outputs by head. Weights are drawn from torch's global generator. Outputs: logits of each token (B, N, V) from a
    head for words, logits of each sample (B, classes) from one for classes, features of each token (B, N, D) from one
    for features, images (B, C, S, S) from one for images, and vectors (B, E) from one for vectors.
    `penstock.models.inputs.Inputs` describes the arguments. With `device="meta"` nothing is allocated or computed.
    Then call `to_empty(device=…)` and `init_weights()`, which also sets the buffers that no state dict has.
    """

    sequence_first = False
    """Whether tokens come before samples inside the blocks."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config: Any = config
        self.graph: Graph = config.graph
        # Computed now, because compiled code can read a cached property but not compute it.
        self.graph.arguments, self.graph.padded, self.graph.written, self.graph.remembered  # noqa: B018
        self.cut: Cut | None = None
        """How each sample's tokens are split over the ranks of a context parallel group."""
        self.head_squares: dict[str, Tensor] | None = None
        """The sum of squared gradients of each head's input, by head; None: it is not recorded."""
        self.both_logits = False
        """Whether a distilled head returns the logits of both its linears, (B, 2, classes), instead of their mean."""
        # Allocated first, so that each weight is drawn once, and in the same order however the model was created.
        with Undrawn():
            self._build(device=device, dtype=dtype)
        self.init_weights()

    # -- parts

    def _build(self, **where: Any) -> None:
        graph = self.graph
        for one in graph.inputs:
            width = graph.width_of(one)
            if isinstance(one, PatchInput):
                stem = PatchStem if one.stem == "patchify" else ConvStem
                self.stem = stem(one, width, **where)
                self.class_token = nn.Parameter(torch.empty(width, **where)) if one.class_token else None
                self.distil_token = nn.Parameter(torch.empty(width, **where)) if one.distil_token else None
                registers = one.registers
                self.registers = nn.Parameter(torch.empty(registers, width, **where)) if registers else None
                continue
            if not hasattr(self, one.table):
                setattr(self, one.table, nn.Embedding(one.vocabulary, width, **where))
            if one.segments:
                self.types = nn.Embedding(one.segments, width, **where)
        if graph.condition is not None:
            modulated = next((run.stack.width for run in graph.runs if run.modulated), graph.width)
            setattr(self, graph.condition.name, Conditioner(graph.condition, modulated, **where))
        for run in graph.runs:
            widths = {"width": graph.width_before(run), "memory": graph.memory_width(run)}
            stack = TokenStack(run, enters=graph.enters(run), one=graph.input_of(run), **widths, **where)
            stack.begins = run.name not in {later.name for later in graph.written[1:]}
            setattr(self, run.name, stack)
        for head in graph.heads:
            for name, part in parts_of_head(graph, head, **where).items():
                setattr(self, name, part)

    def _part(self, head: Head, part: str) -> Any:
        return getattr(self, part_of(head, part), None)

    # -- one pass

    def forward(
        self, *args: Any, times: Tensor | None = None, classes: Tensor | None = None, lengths: Described = None,
        segments: Tensor | None = None, documents: Described = None, targets: Described = None,
        rows: Described = None, prefixes: Tensor | None = None, smoothing: float | None = None,
        past: TokenCache | None = None, memory_index: Tensor | None = None, routes: Tensor | None = None,
        token_weights: Tensor | None = None, by_sample: bool | None = None, **tensors: Tensor | None,
    ) -> Any:  # fmt: skip
        """The output of the head, or outputs by head. The tensors of the graph's inputs come first, or by name; all
        arguments may be positional, in the order of `graph.arguments`. None means not given. See `Inputs`.

        Raises TypeError for arguments that the model does not have.
        """
        given = Inputs.of(
            self.graph, args, **tensors, times=times, classes=classes, lengths=lengths, segments=segments,
            documents=documents, targets=targets, rows=rows, prefixes=prefixes, smoothing=smoothing, past=past,
            memory_index=memory_index, routes=routes, token_weights=token_weights, by_sample=by_sample,
        )  # fmt: skip
        # With a KV cache, samples are not cut, and only the output over words is computed.
        graph, cut = self.graph, self.cut
        shares = Shares(cut, graph, given) if cut is not None and given.past is None else None
        runs, heads = graph.runs, graph.heads
        if given.past is not None and graph.words is not None:
            runs, heads = (*graph.remembered, *graph.written), (graph.words,)
        outputs: dict[str, Tensor] = {}
        if graph.condition is not None:
            outputs[graph.condition.name] = self._condition(graph.condition.name, given)
        for run in runs:
            self._compute(run, given, outputs, shares)
        there = (head for head in heads if head.run in outputs)
        results = {head.name: self._read(head, outputs, given, shares) for head in there}
        return next(iter(results.values())) if len(graph.heads) == 1 else results

    def _compute(
        self, run: Run, given: Inputs, outputs: dict[str, Tensor], shares: Shares | None = None
    ) -> None:
        """Add the output of a run to `outputs`, unless its input is not given."""
        graph = self.graph
        x = self._tokens_of(run, given, outputs, shares)
        if x is None:
            return
        facts: dict[str, Any] = {}
        if any(name in outputs for name in run.memories):  # else the KV cache holds it
            facts |= memory_of(graph, run, given, outputs, cut=shares is not None)
        if shares is not None:
            facts["past"] = shares.tokens(run)
        elif isinstance(graph.input_of(run), TokenInput):
            facts |= texts_of(graph, run, given)
        if run.stack.experts:
            facts["routes"] = given.routes
            if run.stack.mixes:
                facts |= balance_of(graph, run, given, x, shares, training=self.training)
        if run.modulated and graph.condition is not None:
            facts["condition"] = outputs[graph.condition.name]
        outputs[run.name] = getattr(self, run.name)(x, RunInputs(**facts))

    def _tokens_of(
        self, run: Run, given: Inputs, outputs: dict[str, Tensor], shares: Shares | None
    ) -> Tensor | None:
        """The tokens (B, N, D) that a run starts from: embedded inputs or another run's output; None if none."""
        there = [one for one in self.graph.inputs_through(run) if one.name in given.tensors]
        if not self.graph.enters(run):
            if run.reads not in outputs or (run.input and not there):
                return None
            x = outputs[run.reads]
            return x[samples_of(self.graph, run, given)] if run.input else x
        if not there:
            return None
        parts = [self.embed(given.tensors[one.name], one, given.segments) for one in there]
        x = parts[0] if len(parts) == 1 else same_length(parts, there)
        cut = None if shares is None or not isinstance(there[0], PatchInput) else shares.cut_of(there[0])
        return x if cut is None else cut.take(x, 1)

    def _condition(self, name: str, given: Inputs) -> Tensor:
        """The vector of each sample that modulates norms, (B, D)."""
        times = given.times
        if times is None or times.dim() != 1:
            raise ConfigError(
                "The model takes the time of each sample, of shape (batch,) and in [0, 1], as `times`, but was given "
                f"{'none' if times is None else tuple(times.shape)}."
            )
        return getattr(self, name)(times, given.classes)  # type: ignore[no-any-return]

    # -- the ends

    def embed(self, values: Tensor, one: Input | None = None, segments: Tensor | None = None) -> Tensor:
        """Embed the values of an input, by default the last, as tokens (B, N, D), without positions."""
        one = one or self.graph.inputs[-1]
        if isinstance(one, PatchInput):
            return self._patches(values, one)
        if values.dim() != 2 or values.is_floating_point():
            raise ConfigError(
                f"The model takes token numbers of shape (batch, tokens), but was given {values.dtype} of shape "
                f"{tuple(values.shape)}."
            )
        x: Tensor = getattr(self, one.table)(values)
        x = x * x.shape[-1] ** 0.5 if one.scaled else x
        if one.segments:
            x = x + self.types(torch.zeros_like(values) if segments is None else segments)
        return x

    def _patches(self, images: Tensor, one: PatchInput) -> Tensor:
        size, channels = one.image_size, one.channels
        if images.shape[1:] != (channels, size, size):
            raise ConfigError(
                f"The model takes images of shape (batch, {channels}, {size}, {size}), but was given "
                f"{tuple(images.shape)}; resize the images, or build the model with another model.image_size."
            )
        x: Tensor = self.stem(images)
        learned = [
            token.view(-1, x.shape[-1]).expand(x.shape[0], -1, -1)
            for token in (self.class_token, self.distil_token, self.registers)
            if token is not None
        ]
        return torch.cat([*learned, x], dim=1) if learned else x

    def _read(self, head: Head, outputs: dict[str, Tensor], given: Inputs, shares: Shares | None) -> Tensor:
        """The output of a head for the features of its run."""
        x = outputs[head.run]
        if self.head_squares is not None and x.requires_grad and not torch.compiler.is_compiling():
            x = x.view_as(x)  # for this head only
            x.register_hook(partial(self._add_square, head.name))  # type: ignore[no-untyped-call]
        if isinstance(head, WordHead):
            targets, rows = (for_head(self.graph, head, one) for one in (given.targets, given.rows))
            if shares is not None:
                return shares.words(self, head, x, targets, rows, given.smoothing)
            by_sample = given.by_sample and head is self.graph.words
            return self.words(x, targets, given.smoothing, rows=rows, head=head, by_sample=by_sample)
        if shares is not None:
            x = shares.whole(x, head)
        if isinstance(head, FeatureHead):
            return x
        if isinstance(head, PixelHead):
            condition = self.graph.condition
            return self.pixels(x, head, None if condition is None else outputs[condition.name])
        lengths = None if given.lengths is None else lengths_of(self.graph, self.graph.run(head.run), given)
        if isinstance(head, VectorHead):
            if head.pool == "last":
                last = x.new_full(x.shape[:1], x.shape[1], dtype=torch.int64) if lengths is None else lengths
                pooled = x[torch.arange(x.shape[0], device=x.device), last - 1]
            else:
                pooled = x[:, 0].clone() if head.pool == "first" else mean_of(x, lengths)
            return getattr(self, head.name)(pooled)  # type: ignore[no-any-return]
        return self.classes(x, head, lengths)

    @torch.no_grad()
    def _add_square(self, name: str, gradient: Tensor) -> None:
        if self.head_squares is not None:
            square = gradient.detach().float().square().sum()
            self.head_squares[name] = (
                self.head_squares[name] + square if name in self.head_squares else square
            )

    def words(
        self, x: Tensor, targets: Tensor | None = None, smoothing: float = 0.0, *, rows: Tensor | None = None,
        head: WordHead | None = None, by_sample: bool = False,
    ) -> Tensor:  # fmt: skip
        """Features (…, D) to logits over the vocabulary (…, V), or to the summed loss of targets (…), with `by_sample`
        for each sample."""
        head = head or self.graph.words
        assert head is not None
        if rows is not None:
            x = x.flatten(0, 1).index_select(0, rows)
        transform = self._part(head, "transform")
        x = x if transform is None else transform(x)
        x = x * x.shape[-1] ** -0.5 if head.scaled else x
        linear = getattr(self, head.name)
        if targets is None:
            return linear(x)  # type: ignore[no-any-return]
        more = {"by_sample": True} if by_sample else {}
        return linear(x, targets, smoothing, **more)  # type: ignore[no-any-return]

    def classes(self, x: Tensor, head: ClassHead, lengths: Tensor | None = None) -> Tensor:
        """Features (B, N, D) to logits of each sample (B, classes); means leave out padding. See `both_logits`."""
        norm = self._part(head, "norm")
        if head.pool == "first":
            # Only the first token or two are read; copied, so that the rest can be freed.
            x = x[:, :2].clone() if head.distilled else x[:, 0].clone()
        else:
            x, norm = (norm(x), None) if head.norm_first and norm is not None else (x, norm)
            if head.pool == "attention":
                x = self._part(head, "attention_pool")(x)
            else:
                mean = mean_of(x[:, head.skipped :], lengths)
                x = torch.cat([x[:, 0], mean], dim=1) if head.pool == "both" else mean
        for part in (norm, self._part(head, "pooler"), self._part(head, "dropout")):
            x = x if part is None else part(x)
        if not head.distilled:
            return getattr(self, head.name)(x)  # type: ignore[no-any-return]
        logits = [getattr(self, name)(token) for name, token in zip(head.linears, x.unbind(1), strict=True)]
        return torch.stack(logits, dim=1) if self.both_logits else (logits[0] + logits[1]) / 2

    def pixels(self, x: Tensor, head: PixelHead, condition: Tensor | None = None) -> Tensor:
        """Features of patches (B, N, D), and the condition of each sample (B, D), to images (B, C, S, S)."""
        x = self._part(head, "norm")(x)
        if condition is not None:
            made = self._part(head, "modulation")(F.silu(condition)).to(x.dtype)
            x = modulate(x, *made[:, None].chunk(2, dim=-1))
        one = self.graph.input_of(self.graph.run(head.run))
        assert isinstance(one, PatchInput)
        return images_of(getattr(self, head.name)(x), one)

    # -- parts of a pass

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the head for words only; arguments as in `forward`."""
        outputs = self(*args, **kwargs)
        assert self.graph.words is not None
        return outputs[self.graph.words.name] if isinstance(outputs, dict) else outputs  # type: ignore[no-any-return]

    def features(
        self, tokens: Tensor, lengths: Tensor | None = None, segments: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Each token's features (B, N, D) in the run that the last head reads."""
        tensors, outputs = {self.graph.inputs[0].name: tokens}, dict[str, Tensor]()
        given = Inputs(tensors=tensors, lengths=lengths, segments=segments, documents=documents)
        for run in self.graph.runs:
            self._compute(run, given, outputs)
        return outputs[self.graph.main.name]

    def written(self, tokens: Tensor) -> Tensor:
        """Features (B, N, D) of a text's tokens, from which the head predicts the next words."""
        assert self.graph.text is not None
        given, outputs = Inputs(tensors={self.graph.text.name: tokens}), dict[str, Tensor]()
        for run in self.graph.written:
            self._compute(run, given, outputs)
        return outputs[self.graph.written[-1].name]

    # -- choices

    def _set(self, name: str, value: Any, kind: type[nn.Module] = nn.Module) -> None:
        """Set an attribute of all modules of class `kind` that have it."""
        for module in self.modules():
            if isinstance(module, kind) and hasattr(module, name):
                setattr(module, name, value)

    @property
    def token_order(self) -> TokenOrder:
        """Order of the token tensor inside the blocks."""
        return "batch_second" if self.sequence_first else "batch_first"

    def set_token_order(self, token_order: TokenOrder) -> None:
        """Choose the order of the token tensor inside the blocks; results do not change."""
        if token_order not in ("batch_first", "batch_second"):
            raise ConfigError(f"There is no token order {token_order!r}; choose batch_first or batch_second.")
        self._set("sequence_first", token_order == "batch_second")

    def set_attention(self, backend: AttentionBackend) -> None:
        """Choose the kernel of attention in every block; results do not change."""
        if backend not in BACKENDS:
            raise ConfigError(f"There is no attention backend {backend!r}; choose of {', '.join(BACKENDS)}.")
        self._set("backend", backend)

    def set_padding(self, padding: Padding) -> None:
        """Choose whether padding tokens are computed; results for other tokens do not change."""
        self._set("padding", padding, TokenStack)

    def set_experts(self, products: ExpertProducts) -> None:
        """Choose how experts are multiplied; results change by rounding only."""
        self._set("plain", products == "loop", ExpertLinear)

    def set_loss(self, form: LossForm) -> None:
        """Choose how the loss of targets is computed; results do not change."""
        self._set("chunked", form == "chunked", Vocabulary)

    def share_tokens(self, cut: Cut) -> None:
        """Compute only this rank's tokens of each sample. All ranks receive whole samples and return the same outputs.
        Raises ConfigError for runs over several inputs: a cut would mix their samples."""
        if any(run.more_inputs for run in self.graph.runs):
            raise ConfigError("plan.cp cannot cut samples of several inputs of one run; use plan.cp=1.")
        self.cut = cut

    def init_weights(self) -> None:
        """Initialise all weights as `graph.init` says: biases to 0, norms to 1, convolutions by He et al."""
        draw_weights(self, self.graph)
