"""The decoding step as one compiled graph, over a cache whose width grows from bucket to bucket.

An eager step runs hundreds of operations from Python. Here torch.compile makes one graph of them: columns are written
by index tensors and masks say what each token attends to, so that the next step is the same graph with other values.
The code does not depend on sizes that change from batch to batch (texts, columns, tokens of a source); only a batch of
one text, and one token per text in place of several beams, are compiled separately.

On a GPU each step is recorded once per bucket of widths and texts as a CUDA graph, and then replayed as a whole: its
tensors stay at their addresses.

The eager pass of `penstock.decode.kv_cache` is the reference, and also reads the prompts.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.config.decoding import RECORDED, bucket
from penstock.containers import replaced
from penstock.containers import tensors as all_tensors
from penstock.decode.kv_cache import Columns, KVCache, run_pass
from penstock.decode.looks import Continuing, grouped_attention
from penstock.errors import ConfigError
from penstock.models.anatomy import let_recompile
from penstock.models.model import Model

BACKEND = "inductor"
"""Backend of torch.compile."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""A function that records a step; it returns a function that replays it, and the tensor that holds the result."""


class StepTensors(NamedTuple):
    """Tensors of one step, with R texts of N tokens each and W columns."""

    tokens: Tensor
    """(R, N)"""
    places: Tensor
    """(R, 1), positions of the tokens."""
    columns: Tensor
    """(R or 1, N), where their keys and values are written."""
    column_places: Tensor
    """(R or 1, W), positions of the tokens in the columns."""
    seen: Tensor | None
    """(R, N, W), which columns each token attends to; None: those whose positions are not after its own."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each block (R, G, W, K), into which the new ones are written."""
    memory: list[tuple[Tensor, Tensor]]
    """Keys and values of the source in each block, (R, G, M, K)."""
    memory_mask: Tensor | None
    """(R, 1, 1, M)"""
    tables: dict[str, Any]
    """Tables of rotations and biases over all positions, from `KVCache`."""
    updates_places: bool
    """Whether the step writes the positions of the new tokens into `column_places`."""


class _CompiledPast(Continuing):
    """The cache of one compiled step, as a model sees it."""

    positions = math.inf

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors, self.column_places = tensors, tensors.column_places
        self.seen, self.tables = tensors.seen, tensors.tables
        texts, tokens = tensors.tokens.shape
        self.places = tensors.places.expand(-1, tokens)
        self.columns = tensors.columns.expand(texts, -1)
        self.remembers = len(tensors.memory) > 0
        if tensors.updates_places:
            tensors.column_places.scatter_(1, self.columns, self.places)

    def attend(self, layer: int, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """See `Continuing.attend`."""
        keys, values = self.tensors.layers[layer]
        texts = torch.arange(k.shape[0], device=k.device)[:, None]
        keys[texts, :, self.columns] = k.transpose(1, 2)
        values[texts, :, self.columns] = v.transpose(1, 2)
        return grouped_attention(q, keys, values, mask, *how)

    def attend_across(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """See `Continuing.attend_across`."""
        (keys, values), mask = self.tensors.memory[layer], self.tensors.memory_mask
        mask = mask if mask is None else mask.to(q.dtype)
        return grouped_attention(q, keys, values, mask, *how)


class Compiled:
    """The compiled step of one model; callers own the caches. `backend` is torch.compile's. `record` records a step for
    replay; None: CUDA graphs on a GPU, and no recording elsewhere."""

    def __init__(self, model: Model, *, backend: Any = None, record: Record | None = None) -> None:
        if model.graph.routed:
            raise ConfigError(
                "A compiled step does not support labels, which choose this model's experts; leave compile out."
            )

        def step(tensors: StepTensors) -> Tensor:
            return run_pass(model, _CompiledPast(tensors), tensors.tokens)

        let_recompile()
        self._step: Callable[[StepTensors], Tensor] = torch.compile(
            step, fullgraph=True, dynamic=False, backend=backend or BACKEND
        )
        self._met: set[Any] = set()
        on_gpu = next(model.parameters()).is_cuda
        self._record = record or (_record_graph if on_gpu else None)
        self._plays: OrderedDict[Any, _Play] = OrderedDict()

    def _run(self, tensors: StepTensors) -> Tensor:
        sizes = (
            tensors.tokens.shape,
            tensors.column_places.shape,
            tensors.seen is None,
            tuple(tensors.memory[0][0].shape if tensors.memory else ()),
        )
        if sizes not in self._met:
            self._met.add(sizes)
            _mark_changing(tensors)
        return self._step(tensors)

    @property
    def rounds(self) -> bool:
        """Whether each new number of texts needs a recording of its own, so that few numbers should occur."""
        return self._record is not None

    def __call__(
        self, past: KVCache, tokens: Tensor, places: Tensor, columns: Tensor, width: int,
        seen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run one step: add its keys and values to `past`, and return logits (R·N, V). `width` is the size of a bucket;
        for the other tensors see `StepTensors`. The next call may overwrite the logits."""
        assert isinstance(past.store, Columns)
        if self.rounds and past.memory and past.memory_mask is not None:
            past.fix_memory(bucket(past.memory[0][0].shape[2]))
        column_places = past.fix(width)
        tensors = StepTensors(
            tokens, places, columns, column_places, seen, past.store.layers, past.memory, past.memory_mask, past.tables,
            not past.in_order,
        )  # fmt: skip
        if self._record is None:
            return self._run(tensors)
        # A tensor that was made in inference mode cannot be written to outside of it.
        key = (
            torch.is_inference_mode_enabled(),
            *((each.shape, each.dtype) for each in all_tensors(tensors)),
        )
        play = self._plays.get(key)
        if play is None:
            play = self._plays[key] = _Play(self._run, tensors, self._record)
            if len(self._plays) > RECORDED:
                self._plays.popitem(last=False)
        self._plays.move_to_end(key)
        return play(past, tensors)


def _mark_changing(tensors: StepTensors) -> None:
    """Mark sizes that change from batch to batch as dynamic; sizes of 1 are not marked."""
    from torch._dynamo import maybe_mark_dynamic  # imported late, because the import takes a second

    changing: list[tuple[Any, tuple[int, ...]]] = [
        (tensors.tokens, (0, 1)), (tensors.places, (0,)), (tensors.columns, (0, 1)),
        (tensors.column_places, (0, 1)), (tensors.seen, (0, 1, 2)), (tensors.memory_mask, (0, 3)),
        (tensors.layers, (0, 2)), (tensors.memory, (0, 2)), (tensors.tables, (1,)),
    ]  # fmt: skip
    for group, dims in changing:
        for tensor in all_tensors(group):
            several = [dim for dim in dims if tensor.shape[dim] > 1]
            maybe_mark_dynamic(tensor, several)


class _Play:
    """A recorded step, and the tensors that it reads and writes."""

    def __init__(self, run: Callable[[StepTensors], Tensor], tensors: StepTensors, record: Record) -> None:
        self.tensors = replaced(tensors, torch.clone)
        self.replay, self.logits = record(lambda: run(self.tensors))
        self.owner: weakref.ref[KVCache] | None = None

    def __call__(self, past: KVCache, tensors: StepTensors) -> Tensor:
        before = None if self.owner is None else self.owner()
        if before is not None and before is not past and self._holds(before):
            before.take(replaced(self.tensors, torch.clone))
        for stored, new in zip(all_tensors(self.tensors), all_tensors(tensors), strict=True):
            if stored is not new:
                stored.copy_(new)
        past.take(self.tensors)
        self.owner = weakref.ref(past)
        self.replay()
        return self.logits

    def _holds(self, past: KVCache) -> bool:
        """Whether this recording still holds the keys and values of `past`."""
        layers = past.store.layers
        return bool(layers) and layers[0][0] is self.tensors.layers[0][0]


def _record_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Record a CUDA graph. The step runs twice before, which compiles it; the first replay overwrites the results of
    these runs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    return graph.replay, logits
