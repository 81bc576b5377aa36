"""The inputs of a model, of a run and of a block in one pass, and the interface of the KV cache.

Shapes: B samples, N tokens, M tokens of a memory, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.graph import Graph, Input, Run, TokenInput, WordHead
from penstock.errors import ConfigError
from penstock.kernels.attention import AttentionMask
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.padding import Real, is_real, within

Described = Tensor | Mapping[str, Tensor] | None

_FORMER = {"sees": "memory_index"}
"""Former names of arguments, mapped to their present names."""


@dataclass(kw_only=True)
class Inputs:
    """The inputs of a model in one pass. A model uses the `tensors` of its graph's inputs, and of the other fields
    only those listed in `graph.arguments`. `lengths` are of the first input that can have them, `targets` and `rows` of
    the last head for words; a mapping names its inputs or heads."""

    tensors: dict[str, Tensor]
    """Token ids (B, N) or images (B, C, S, S) by input; an input that is left out is not computed."""
    times: Tensor | None = None
    """(B,) in [0, 1], for a model with a condition; in fp64, so that half precision does not round them."""
    classes: Tensor | None = None
    """(B,) int64, for a condition with classes; the number of classes means no class; None: no sample has one."""
    lengths: Described = None
    """(B,), the number of non-padding tokens of each sample; padding comes last, and a decoder never attends to it."""
    segments: Tensor | None = None
    """(B, N), the kind of each token's segment; None: all 0."""
    documents: Described = None
    """(B, N), numbers that change where a new document begins: attention does not cross from one document to the next,
    and positions start again at 0."""
    targets: Described = None
    """(B, N) int64, where −100 is ignored: the head returns the sum of −log p over them, 0-d, fp32."""
    rows: Described = None
    """(M,), indices into all tokens (B·N): only these tokens reach the head, so that logits are (M, V) and targets
    (M,)."""
    prefixes: Tensor | None = None
    """(B,), the number of first tokens of each text that attend to each other, for prefix language models; None: 0."""
    smoothing: float = 0.0
    """Label smoothing of the loss."""
    past: TokenCache | None = None
    """Cached keys and values of the preceding tokens; once it holds a memory, that memory's inputs are left out."""
    memory_index: Tensor | None = None
    """(B,) int64, the index of the memory that each sample's cross attention reads, if there are several; None: all."""
    routes: Tensor | None = None
    """(B,) int64, the label of each sample, for models with labels; without labels, its expert, if the router is
    `given`."""
    token_weights: Tensor | None = None
    """(B, M), factors of the attention to tokens of a text, before it is normalised, for text-to-image models (Feng et
    al., CVPR 2023, "ERNIE-ViLG 2.0", section 2.2)."""
    by_sample: bool = False
    """Whether the last head for words returns the sum for each sample, (B,); needs `rows` to be None."""

    @classmethod
    def of(cls, graph: Graph, args: Sequence[Any], **named: Any) -> Inputs:
        """Collect a model's positional arguments, in the order of `graph.arguments`, and named ones."""
        names = graph.arguments
        every = [*zip(names, args), *named.items()]
        given = {_FORMER.get(name, name): value for name, value in every if value is not None}
        others = given.keys() - {*names}
        if others or len(args) > len(names):
            more = ", ".join(sorted(others))
            raise TypeError(f"The model takes {', '.join(names)}, not {len(args)} values and {more}.")
        tensors = {one.name: given.pop(one.name) for one in graph.inputs if one.name in given}
        return cls(tensors=tensors, **given)


class RunInputs(NamedTuple):
    """The inputs of a run besides its tokens. A run over images has none but a memory, routes or a condition.

    `lengths`, `documents` and `prefixes` are as in `Inputs`, and `memory_lengths` (B,) count the memory's tokens
    without padding; several memories, or weighted tokens, have a mask `memory_seen` (B, 1, 1, M) instead. `batches`
    lists, for each input, the number of consecutive samples and whether they are causal; empty: as the run. `shares`
    (B, N) and `order` (B, N) are as `shares` and `places` in `Context`, and `routes` (B,) is the given expert, or group
    of experts, of each sample. `condition` (B, D) modulates the blocks of a modulated run.
    """

    lengths: Tensor | None = None
    documents: Tensor | None = None
    prefixes: Tensor | None = None
    batches: tuple[tuple[int, bool], ...] = ()
    past: TokenCache | None = None
    memory: Tensor | None = None
    memory_lengths: Tensor | None = None
    memory_seen: Tensor | None = None
    shares: Tensor | None = None
    routes: Tensor | None = None
    order: Tensor | None = None
    condition: Tensor | None = None


NOTHING = RunInputs()


class Context(NamedTuple):
    """The inputs of all blocks of a run besides the tokens. Masks are as `attention` takes them."""

    mask: Tensor | AttentionMask | None = None
    near: Tensor | AttentionMask | None = None
    """The mask of blocks with a sliding window."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of rotary positions, broadcastable to the first half of each head's features."""
    near_rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for blocks with a sliding window."""
    memory: Tensor | None = None
    """Features that cross attention reads, in token order."""
    memory_mask: Tensor | AttentionMask | None = None
    real: Real | None = None
    """The tokens that are computed, if padding is skipped everywhere but in attention: see
    `penstock.kernels.padding`."""
    shares: Tensor | None = None
    """The weight of each token in the balance of experts, in token order, fp64: 0 for padding, equal for the other
    tokens of a sample; all samples together have 1. None: equal for all tokens."""
    routes: Tensor | None = None
    """The given expert, or group of experts, of each token, in token order."""
    samples: Tensor | None = None
    """The index of each token's sample, in token order, if experts are chosen by sample."""
    places: Tensor | None = None
    """The index of each token, counted over all samples one after the other, in token order, if experts have a
    capacity, which the first tokens fill."""
    condition: Tensor | None = None
    """The vector of each sample that modulates norms, with a size-1 dimension for the tokens."""
    samples_of: tuple[Tensor, ...] = ()
    """The indices of the samples of each expert, if experts are whole blocks."""
    causal: bool | None = None
    """Whether attention is causal, if there is no mask. None: as the blocks were built."""

    def take(self, samples: Tensor, along: int) -> Context:
        """The inputs of these samples only; samples are dimension `along` of the tokens."""
        mask = self.memory_mask
        if mask is not None:
            assert isinstance(mask, Tensor)
            mask = mask.index_select(0, samples)
        memory, condition = (
            None if one is None else one.index_select(along, samples) for one in (self.memory, self.condition)
        )
        return self._replace(memory=memory, memory_mask=mask, condition=condition)


ALONE = Context()


class TokenCache(Protocol):
    """The interface of the KV cache with which a model continues a text: see `penstock.decode.kv_cache`."""

    places: Tensor
    """Positions of the tokens of this pass, (N,) or (B, N)."""
    remembers: bool
    """Whether it also holds the keys and values of the memory, so that the source need not be encoded again."""

    def context(self, stack: Any, x: Tensor, memory: Tensor | None) -> Context:
        """The `Context` for the blocks of a `TokenStack` in this pass."""
        ...

    def see(self, seen: Tensor) -> None:
        """Store which tokens of several memories each text attends to, (B, 1, 1, M)."""
        ...


class Continued(AttentionMask):
    """An `AttentionMask` over new tokens and the cached tokens before them."""

    first: bool
    """Whether the cache is still empty."""

    def keep(self, k: Tensor, v: Tensor) -> Tensor | None:
        """Cache keys and values of the first tokens, (B, G, N, K), and return the mask of their scores; None: causal.
        If values have no features, the keys are used as values."""
        raise NotImplementedError


# -- facts about the samples of one pass, by run


def texts_of(graph: Graph, run: Run, given: Inputs) -> dict[str, Any]:
    """Fields of `RunInputs` for a run over texts."""
    there = [one for one in graph.inputs_through(run) if one.name in given.tensors]
    hides = [graph.hides_later(run, one) for one in there]
    continued = all(hides) and run.name in {one.name for one in graph.written}
    facts: dict[str, Any] = {
        "lengths": lengths_of(graph, run, given), "documents": documents_of(graph, run, given),
        "prefixes": prefixes_of(graph, run, given), "past": given.past if continued else None,
    }  # fmt: skip
    if run.more_inputs:
        facts["batches"] = tuple((given.tensors[one.name].shape[0], each) for one, each in zip(there, hides))
    return facts


def counts_of(graph: Graph, run: Run, given: Inputs, length: int) -> Tensor | None:
    """The number of first tokens of each sample that count in the balance of a run's experts, (B,): the non-padding
    tokens; in a causal run the tokens up to the last target, because later ones do not affect the loss. Without targets
    all tokens count.
    """
    if not run.causal:  # for a causal input, all
        return lengths_of(graph, run, given)
    head = next((head for head in graph.heads_of(WordHead) if head.run == run.name), None)
    targets = None if head is None else for_head(graph, head, given.targets)
    if head is None or targets is None:
        return None
    rows, targeted = for_head(graph, head, given.rows), targets.flatten() != IGNORED
    if rows is not None:
        samples = len(given.tensors[graph.input_of(run).name])
        every = torch.zeros(samples * length, dtype=torch.bool, device=targeted.device)
        targeted = every.index_fill_(0, rows[targeted], True)
    places = torch.arange(1, length + 1, device=targeted.device)
    return (targeted.view(-1, length) * places).amax(1)


def _beside(graph: Graph, run: Run, outputs: dict[str, Tensor]) -> Tensor:
    """The memories of a run that were computed, concatenated along the tokens: (B, M, D)."""
    width = graph.memory_width(run)
    every = [outputs[name] for name in run.memories if name in outputs]
    wide = [one if one.shape[2] == width else F.pad(one, (0, width - one.shape[2])) for one in every]
    return wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)


def memory_of(
    graph: Graph, run: Run, given: Inputs, outputs: dict[str, Tensor], *, cut: bool
) -> dict[str, Any]:
    """The memory fields of a run's inputs: the joined memories, and their masks, which `Shares` makes if samples are
    `cut`."""
    if cut:
        return {"memory": _beside(graph, run, outputs)}
    names, index = [name for name in run.memories if name in outputs], given.memory_index
    lengths = [lengths_of(graph, graph.run(name), given) for name in names]
    memory = _beside(graph, run, outputs)
    weights = given.token_weights
    if weights is not None:
        assert len(names) == 1
        # Scores plus log w give w times the attention, before it is normalised.
        more, hidden = weights.to(memory.dtype).log()[:, None, None], ~_seen(lengths[0], memory)
        return {"memory": memory, "memory_seen": more.masked_fill(hidden, -torch.inf)}
    if len(run.memories) == 1:
        return {"memory": memory, "memory_lengths": lengths[0]}
    seen = None
    if index is not None or given.past is not None or any(length is not None for length in lengths):
        each = [_seen(length, outputs[name]) for length, name in zip(lengths, names)]
        if index is not None:
            numbers = map(run.memories.index, names)
            each = [part & (index == number)[:, None, None, None] for number, part in zip(numbers, each)]
        seen = torch.cat(each, dim=3)
    return {"memory": memory, "memory_seen": seen}


def lengths_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """The number of non-padding tokens of each sample of a run, (B,)."""
    lengths = given.lengths
    if lengths is None or (run.causal and graph.input_of(run).name != graph.padded):
        return None
    every = lengths if isinstance(lengths, Mapping) else {graph.padded: lengths}
    return _of_samples(
        graph, run, given, every, lambda values: values.new_full(values.shape[:1], values.shape[1])
    )


def documents_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """The number of the document that each token of a run belongs to, (B, N)."""
    documents = given.documents
    if not isinstance(documents, Mapping):
        return documents
    return _of_samples(graph, run, given, documents, torch.zeros_like)


def prefixes_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """The number of first tokens of each sample of a run that attend to each other, (B,)."""
    prefixes = given.prefixes
    if prefixes is None:
        return None
    every = {one.name: prefixes for one in graph.inputs_of(TokenInput) if one.prefix}
    return _of_samples(graph, run, given, every, lambda values: torch.zeros_like(values[:, 0]))


def _of_samples(
    graph: Graph, run: Run, given: Inputs, every: Mapping[str, Any], plain: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Values by input, joined over all samples of a run; `plain` makes missing ones. None if no input has any."""
    there = [one.name for one in graph.inputs_through(run) if one.name in given.tensors]
    values = [every.get(name) for name in there]
    if all(value is None for value in values):
        return None
    parts = [plain(given.tensors[name]) if value is None else value for name, value in zip(there, values)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def samples_of(graph: Graph, run: Run, given: Inputs) -> slice:
    """Slice of a run's input samples that come from its own input."""
    first = 0
    for one in graph.inputs_through(graph.run(run.reads)):
        if one.name == run.input:
            break
        first += given.tensors[one.name].shape[0] if one.name in given.tensors else 0
    return slice(first, first + given.tensors[run.input].shape[0])


def for_head(graph: Graph, head: WordHead, value: Any) -> Tensor | None:
    """Targets or rows of a head for words: its entry in a mapping, or for the last such head the value itself."""
    if isinstance(value, Mapping):
        return value.get(head.name)
    return value if head is graph.words else None


def _seen(lengths: Tensor | None, x: Tensor) -> Tensor:
    """Mask (B, 1, 1, N) of the non-padding tokens of x (B, N, D)."""
    most = x.new_full(x.shape[:1], x.shape[1]) if lengths is None else lengths
    return within(most, x.shape[1])


def mean_of(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean over the non-padding tokens of each sample: (B, N, D) → (B, D)."""
    if lengths is None:
        return x.mean(1)
    real = is_real(lengths, x.shape[1])[..., None]
    return x.masked_fill(~real, 0.0).sum(1) / lengths[:, None].to(x.dtype)


def shares_of(counts: Tensor, tokens: int) -> Tensor:
    """Equal shares (B, N) of the first `counts` tokens of each sample, which sum to 1 / B; see `Context.shares`."""
    return is_real(counts, tokens).double() / (len(counts) * counts.clamp(min=1))[:, None]


def balance_of(
    graph: Graph, run: Run, given: Inputs, x: Tensor, cut: Any, *, training: bool
) -> dict[str, Tensor | None]:
    """The `shares` and `order` of a run's inputs, for the tokens x (B, N, D) that this rank computes; `cut` is its
    `penstock.models.context.Shares`, None if it computes whole samples."""
    tokens = x.shape[1] if cut is None else cut.tokens(run).count
    counts, order = counts_of(graph, run, given, tokens), None
    if cut is not None:
        shares = cut.balance(run, x.new_full(x.shape[:1], tokens) if counts is None else counts)
    else:
        shares = None if counts is None else shares_of(counts, tokens)
    if run.stack.capacity is not None and training:
        own = torch.arange(tokens, device=x.device) if cut is None else cut.numbers(run, x.device)
        length = x.shape[1] if cut is None else x.shape[1] * cut.cut.size
        order = torch.arange(len(x), device=x.device)[:, None] * length + own
    return {"shares": shares, "order": order}


def same_length(parts: list[Tensor], inputs: list[Input]) -> Tensor:
    """Concatenate the samples of several inputs. Raises ConfigError unless all samples have the same length."""
    if any(part.shape[1] != parts[0].shape[1] for part in parts):
        lengths = " and ".join(f"{one.name} {part.shape[1]}" for one, part in zip(inputs, parts))
        raise ConfigError(f"Samples that one run computes are equally long, but have {lengths} tokens.")
    return torch.cat(parts)
