"""Facts about the samples of one pass, by run: lengths, documents, prefixes, and the memory of others.

`given` are the inputs of the model. Shapes: B samples, N tokens, M tokens of a memory, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.graph import Graph, Run, TokenInput, WordHead
from penstock.kernels.cross_entropy import IGNORED
from penstock.models.inputs import Inputs
from penstock.models.positions import is_real, within


def texts_of(graph: Graph, run: Run, given: Inputs) -> dict[str, Any]:
    """Fields of `RunInputs` for a run over texts."""
    there = [one for one in graph.inputs_through(run) if one.name in given.tensors]
    hides = [graph.hides_later(run, one) for one in there]
    continued = all(hides) and run.name in {one.name for one in graph.written}
    facts = {
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
