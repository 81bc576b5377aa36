"""The inputs of a model, of a run and of a block in one pass, and the cache of a text that is continued.

Shapes: B samples, N tokens, M tokens of a memory, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.graph import Graph, Run, TokenInput, WordHead
from penstock.kernels.attention import AttentionMask
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.padding import Real
from penstock.models.positions import is_real, within

Described = Tensor | Mapping[str, Tensor] | None


@dataclass(kw_only=True)
class Inputs:
    """The inputs of a model in one pass. Each model has the `tensors` of its graph's inputs, and of the other fields
    those that `graph.arguments` names. `lengths`, `targets` and `rows` are of the first input and the last head for
    words that can have them, or mappings by name."""

    tensors: dict[str, Tensor]
    """Token numbers (B, N) and images (B, C, S, S) by input; what is left out is not computed."""
    times: Tensor | None = None
    """(B,) in [0, 1], of a model with a condition; in fp64, lest half precision round them."""
    classes: Tensor | None = None
    """(B,) int64, of a condition with classes; the number of classes stands for none, as do no classes."""
    lengths: Described = None
    """(B,), how many tokens of each sample are no padding, which comes last; a decoder sees none."""
    segments: Tensor | None = None
    """(B, N), kinds of segments; None: all 0."""
    documents: Described = None
    """(B, N), numbers that change where another document begins: attention does not cross from one to the next, and
    positions start again."""
    targets: Described = None
    """(B, N) int64, of which −100 counts nothing: the head returns the sum of −log p over them, 0-d, fp32."""
    rows: Described = None
    """(M,), numbers of tokens, counted through all samples (B·N): only these reach the head, so that logits are (M, V)
    and targets (M,)."""
    prefixes: Tensor | None = None
    """(B,), how many first tokens of each text that is continued see each other, of models that were made for it; None:
    0."""
    smoothing: float = 0.0
    """Label smoothing of the loss."""
    past: TokenCache | None = None
    """The keys and values of earlier tokens, which the tokens follow; once it remembers a memory, the inputs of that
    are left out."""
    sees: Tensor | None = None
    """(B,) int64, the number of the memory that each sample's cross attention sees, of several; None: all."""
    routes: Tensor | None = None
    """(B,) int64, the label of each sample, of models that have labels; without them, its expert, where the router is
    `given`."""
    token_weights: Tensor | None = None
    """(B, M), factors of the attention that tokens of a text get, before it is normalised, of models that make images
    of texts (Feng et al., CVPR 2023, "ERNIE-ViLG 2.0", section 2.2)."""
    by_sample: bool = False
    """Whether the last head for words returns that sum for each sample, (B,), without `rows`."""


class RunInputs(NamedTuple):
    """The inputs of a run besides its tokens. A run over images has none but a memory, routes or a condition.

    `lengths`, `documents` and `prefixes` are as in `Inputs`, `memory_lengths` those of the memory (B, M, D); of several
    memories `memory_seen` (B, 1, 1, M) says which tokens are none. `batches` are how many consecutive samples there are
    of each input, and whether they are causal; none: all samples are as the run is. `shares` (B, N) and `order` (B, N),
    there called places, are as in `Context`, and `routes` (B,) the expert of each sample, or its group of experts,
    where they are given. `condition` (B, D) modulates the blocks of a run that is modulated.
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
    """Cosine and sine of rotary positions, broadcast to the first half of each head's features."""
    near_rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for blocks with a sliding window."""
    memory: Tensor | None = None
    """Features that cross attention reads, in the order of the tokens."""
    memory_mask: Tensor | AttentionMask | None = None
    real: Real | None = None
    """Which tokens are computed, if padding is left out but attention sees it: see `penstock.kernels.padding`."""
    shares: Tensor | None = None
    """The share of each token in the balance of experts, in the order of the tokens, fp64: 0 of padding; the others of
    a sample have alike shares, and all samples together 1. None: alike ones of all."""
    routes: Tensor | None = None
    """The expert of each token, or its group of experts, in the order of the tokens, where they are given."""
    samples: Tensor | None = None
    """The number of each token's sample, in the order of the tokens, where experts are chosen by sample."""
    places: Tensor | None = None
    """The place of each token among all of the samples, sample by sample, in the order of the tokens, where experts
    have room for the first ones alone."""
    condition: Tensor | None = None
    """The vector of each sample that modulates norms, with a dimension of 1 for the tokens."""
    samples_of: tuple[Tensor, ...] = ()
    """The numbers of the samples of each expert, where experts are whole blocks."""
    causal: bool | None = None
    """Whether a token sees itself and those before it only, where no mask says so. None: as the blocks are made."""

    def take(self, samples: Tensor, along: int) -> Context:
        """The inputs of these samples alone, which are dimension `along` of the tokens."""
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
    """The keys and values of earlier tokens, with which a model continues them: see `penstock.decode.kv_cache`."""

    places: Tensor
    """Positions of the tokens of this pass, (N,) or (B, N)."""
    remembers: bool
    """Whether it keeps the keys and values of the memory too, so that no source need be encoded."""

    def context(self, stack: Any, x: Tensor, memory: Tensor | None) -> Context:
        """The `Context` for the blocks of a `TokenStack` in this pass."""
        ...

    def see(self, seen: Tensor) -> None:
        """Note which tokens of several memories each text sees, (B, 1, 1, M)."""
        ...


class Continued(AttentionMask):
    """An `AttentionMask` of tokens and of those before them, whose keys and values are kept."""

    first: bool
    """Whether nothing is kept yet."""

    def keep(self, k: Tensor, v: Tensor) -> Tensor | None:
        """Keep keys and values of the first tokens, (B, G, N, K), and return the mask of their scores; None: causal.
        Values without features are those of the keys."""
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
    """How many first tokens of each sample of a run count in the balance of its experts, (B,): those that are no
    padding. Of a causal run these are those up to the last target, for those after it change no loss; all of them
    where the model is given no targets.
    """
    if not run.causal:  # of an input whose tokens hide later ones, all
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
    """The tokens of all memories of a run that are there, one after the other: (B, M, D)."""
    width = graph.memory_width(run)
    every = [outputs[name] for name in run.memories if name in outputs]
    wide = [one if one.shape[2] == width else F.pad(one, (0, width - one.shape[2])) for one in every]
    return wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)


def memory_of(
    graph: Graph, run: Run, given: Inputs, outputs: dict[str, Tensor], *, cut: bool
) -> dict[str, Any]:
    """The memory of a run: the outputs of those that it attends to, one after the other. Where ranks `cut` samples,
    `Shares` knows which tokens are seen."""
    if cut:
        return {"memory": _beside(graph, run, outputs)}
    names, sees = [name for name in run.memories if name in outputs], given.sees
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
    if sees is not None or given.past is not None or any(length is not None for length in lengths):
        each = [_seen(length, outputs[name]) for length, name in zip(lengths, names)]
        if sees is not None:
            numbers = map(run.memories.index, names)
            each = [part & (sees == number)[:, None, None, None] for number, part in zip(numbers, each)]
        seen = torch.cat(each, dim=3)
    return {"memory": memory, "memory_seen": seen}


def lengths_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """How many tokens of each sample of a run are no padding, (B,)."""
    lengths = given.lengths
    if lengths is None or (run.causal and graph.input_of(run).name != graph.padded):
        return None
    every = lengths if isinstance(lengths, Mapping) else {graph.padded: lengths}
    return _of_samples(
        graph, run, given, every, lambda values: values.new_full(values.shape[:1], values.shape[1])
    )


def documents_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """The numbers of the documents that the tokens of a run are of, (B, N)."""
    documents = given.documents
    if not isinstance(documents, Mapping):
        return documents
    return _of_samples(graph, run, given, documents, torch.zeros_like)


def prefixes_of(graph: Graph, run: Run, given: Inputs) -> Tensor | None:
    """How many first tokens of each sample of a run see each other, (B,)."""
    prefixes = given.prefixes
    if prefixes is None:
        return None
    every = {one.name: prefixes for one in graph.inputs_of(TokenInput) if one.prefix}
    return _of_samples(graph, run, given, every, lambda values: torch.zeros_like(values[:, 0]))


def _of_samples(
    graph: Graph, run: Run, given: Inputs, every: Mapping[str, Any], plain: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Facts by input as one tensor over all samples of a run; `plain` makes those of inputs that have none. None
    where no input has any."""
    there = [one.name for one in graph.inputs_through(run) if one.name in given.tensors]
    values = [every.get(name) for name in there]
    if all(value is None for value in values):
        return None
    parts = [plain(given.tensors[name]) if value is None else value for name, value in zip(there, values)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def samples_of(graph: Graph, run: Run, given: Inputs) -> slice:
    """Which samples of what a run reads are of its own input."""
    first = 0
    for one in graph.inputs_through(graph.run(run.reads)):
        if one.name == run.input:
            break
        first += given.tensors[one.name].shape[0] if one.name in given.tensors else 0
    return slice(first, first + given.tensors[run.input].shape[0])


def for_head(graph: Graph, head: WordHead, value: Any) -> Tensor | None:
    """Targets or rows of a head for words: those of its name in a mapping, or those of the last such head alone."""
    if isinstance(value, Mapping):
        return value.get(head.name)
    return value if head is graph.words else None


def _seen(lengths: Tensor | None, x: Tensor) -> Tensor:
    """Which tokens of x (B, N, D) are no padding, (B, 1, 1, N)."""
    most = x.new_full(x.shape[:1], x.shape[1]) if lengths is None else lengths
    return within(most, x.shape[1])


def mean_of(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean over the tokens of each sample that are no padding: (B, N, D) → (B, D)."""
    if lengths is None:
        return x.mean(1)
    real = is_real(lengths, x.shape[1])[..., None]
    return x.masked_fill(~real, 0.0).sum(1) / lengths[:, None].to(x.dtype)
