"""Beam search as one ONNX graph: prompts go in, the best texts come out, and any runtime of ONNX takes the steps.

The file is `search.onnx`: from `input_ids` (B, N), `attention_mask` (B, N) and `max_tokens` () to `sequences` (B, b, T)
with −1 behind the last token of each, and `scores` (B, b), the best first. The pass over the prompt stands in the graph
itself. Each turn of an ONNX `Loop` chooses beams as `penstock.infer.beam` does, lets keys and values follow them, and
passes their tokens through the decoder. The loop ends when no text can become better.

Masks are int64, 0 for padding: in front of a decoder's prompts, behind an encoder–decoder's sources.

Shapes: B texts, b beams, N tokens of a prompt or a source, T tokens made, V vocabulary; G heads of keys, C columns of
the cache, K features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.decoding import Decoding
from penstock.config.model import positions, stacks
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.infer.beam import search
from penstock.infer.choose import NOTHING
from penstock.infer.load import Loaded, loaded
from penstock.infer.onnx_cache import Continues, Given, Translates, between, flat
from penstock.infer.onnx_file import in_onnx, opened, packages
from penstock.infer.texts import Prompts
from penstock.models.anatomy import set_attention
from penstock.models.decoder import Decoder
from penstock.models.seq2seq import Seq2Seq

SEARCH = "search.onnx"
_OUT = -1e9
"""Score of what must not be chosen, as in `penstock.infer.beam`."""
_CHANGING = ("logits", "scores", "texts", "done", "done_scores", "finished", "hopeful")
"""What a turn is given and gives again, besides a decoder's mask, and keys and values."""
_FIRST = [name for name in _CHANGING if name != "done"]
"""What the first turn is given; texts that are done begin as those that go on."""
_BATCH, _PROMPT, _MADE, _KEPT = 2, 4, 3, 6
"""Of the example, no two of them alike; other sizes work as well."""
_TEXTS, _LONGEST, _STEPS = 3, 6, 5
"""Of the run that checks."""
_LARGE = 1 << 30
"""Bytes of weights above which they lie in a file of their own; protocol buffers hold two GiB."""


def write_search(model: str | Path, target: Path, decoding: Decoding) -> tuple[Path, Tensor, Tensor]:
    """Write the search of a model's folder into the folder `target`: the file, and scores of some drawn prompts' texts
    as ONNX Runtime and as our own search give them. `decoding` may set beams, length_penalty, early_stopping and
    ignore_end.

    Raises ConfigError for other settings, and for a model that does not generate.
    """
    packages()
    found = loaded(model, Plan(), weights="plain", tokenizer=None)
    if problems := list(_problems(found, decoding)):
        raise ConfigError(problems)
    found.model.requires_grad_(False)
    set_attention(found.model, "sdpa")
    target.mkdir(parents=True, exist_ok=True)
    path = target / SEARCH
    with torch.no_grad():
        _save(_searching(found, decoding), path)
        return path, *_tried(path, found, decoding)


def _problems(found: Loaded, decoding: Decoding) -> Iterator[str]:
    """Why there is no such file."""
    known = {
        name: getattr(decoding, name) for name in ("beams", "length_penalty", "early_stopping", "ignore_end")
    }
    if replace(Decoding(), **known) != decoding:
        yield "A search in ONNX has beams, length_penalty and early_stopping; leave other settings of decoding out."
    if not isinstance(found.model, Decoder | Seq2Seq):
        yield f"A {type(found.model).__name__} generates no text, so there is nothing to search; choose --to onnx."
    elif isinstance(found.model, Seq2Seq) and found.start is None:
        yield (
            "The model does not say which token its decoder begins with; write decoder_start_token_id into its "
            "config.json."
        )


class _Begins(nn.Module):
    """The pass over prompts: what the first turn is given."""

    scores: Tensor

    def __init__(self, found: Loaded, beams: int) -> None:
        super().__init__()
        self.model, self.start, self.beams = found.model, found.start, beams
        self.positions = positions(found.model.config)[-1]
        # At first all beams are the same, so all but one are out.
        self.register_buffer("scores", torch.tensor([0.0, *[_OUT] * (beams - 1)]))

    def forward(self, tokens: Tensor, mask: Tensor) -> list[Tensor]:
        """`_FIRST`, the mask as a turn takes it, keys and values, and those of a source."""
        rows, beams = tokens.shape[0], self.beams
        memory: list[Tensor] = []
        if isinstance(self.model, Seq2Seq):
            first = torch.full_like(tokens[:, :1], self.start or 0)
            past = Given([], torch.ones_like(first), 1, self.positions)
            past.remember(mask.sum(1), mask.shape[1])
            logits = self.model(tokens, first, mask.sum(1), past=past)[:, -1]
            memory = [self._beams(each) for each in flat(past.memory)]
        else:
            past = Given([], mask, tokens.shape[1], self.positions)
            last = (torch.arange(rows) + 1) * tokens.shape[1] - 1
            logits = self.model(tokens, None, None, last, past=past)
            mask = F.pad(mask, (0, 1), value=1)
        # Texts begin with a column that is left out at the end, so that no tensor is ever empty.
        texts = torch.full((rows, beams, 1), NOTHING)
        state = [
            self._beams(logits.float()), self.scores.expand(rows, -1).clone(), texts,
            torch.full((rows, beams), _OUT), torch.zeros(rows, beams, dtype=torch.bool),
            torch.ones(rows, 1, dtype=torch.bool),
        ]  # fmt: skip
        kept = [self._beams(each) for each in flat(past.store.layers)]
        return [*state, self._beams(mask), *kept, *memory]

    def _beams(self, x: Tensor) -> Tensor:
        """(B, …) as (B, b, …)."""
        return x[:, None].expand(-1, self.beams, *x.shape[1:]).clone()


class _Turn(nn.Module):
    """One turn of the search, as `penstock.infer.beam` takes it: beams are chosen from logits, and passed on."""

    stops: Tensor
    bias: Tensor | None

    def __init__(self, found: Loaded, decoding: Decoding) -> None:
        super().__init__()
        self.decoding, self.beams = decoding, decoding.beams
        self.passes = (Continues if isinstance(found.model, Decoder) else Translates)(found.model)
        size: int = found.model.config.vocabulary
        ends = () if decoding.ignore_end else found.ends
        self.kept = min(max(2, 1 + len(ends)) * self.beams, size * self.beams)
        bias = torch.zeros(size)
        for number, amount in Decoding(bias=found.never).biases:
            if number < size:
                bias[number] += amount
        self.register_buffer("stops", torch.tensor(ends, dtype=torch.int64))
        self.register_buffer("bias", bias if found.never else None)

    def forward(
        self,
        step: Tensor,
        most: Tensor,
        state: list[Tensor],
        mask: Tensor,
        kept: list[Tensor],
        memory: list[Tensor],
    ) -> list[Tensor]:
        """Whether the search goes on, `_CHANGING`, a decoder's mask, keys and values."""
        going, chosen, parents, changed = self._chosen(step, most, state)
        rows = parents.shape[0]
        before = (torch.arange(rows)[:, None] * self.beams + parents).flatten()
        followed = [each.flatten(0, 1).index_select(0, before) for each in kept]
        tokens, sees = chosen.view(-1, 1), mask.flatten(0, 1)
        if memory:
            logits, *grown = self.passes(
                tokens, sees, between(followed, [each.flatten(0, 1) for each in memory])
            )
        else:
            logits, *grown = self.passes(tokens, sees, followed)
        shaped = [each.unflatten(0, (rows, self.beams)) for each in (logits[:, -1].float(), *grown)]
        told = [] if memory else [F.pad(mask, (0, 1), value=1)]
        return [going, shaped[0], *changed, *told, *shaped[1:]]

    def _chosen(
        self, step: Tensor, most: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Whether any text can become better, the tokens and the parents of new beams, twice (B, b), and the state."""
        logits, scores, texts, done, done_scores, finished, hopeful = state
        beams, size, penalty = self.beams, logits.shape[2], self.decoding.length_penalty
        likely = torch.log_softmax(logits, dim=-1)
        likely = likely if self.bias is None else likely + self.bias
        best, places = (likely + scores[:, :, None]).flatten(1).topk(self.kept)
        parents = torch.div(places, size, rounding_mode="floor")
        chosen = places - parents * size
        ending = torch.zeros_like(chosen, dtype=torch.bool)
        if len(self.stops):
            ending = (chosen[:, :, None] == self.stops).any(-1)
        hits = ending | (step + 1 >= most)
        counts = hits & (torch.arange(self.kept) < beams)
        made = (step + 1).float() ** penalty
        finals = best / made + _out(~counts) + _out(~hopeful)
        if self.decoding.early_stopping == "full":
            finals = finals + _out(finished.all(1, keepdim=True))
        done_scores, at = torch.cat([done_scores, finals], dim=1).topk(beams)
        behind = torch.where(ending, NOTHING, chosen)
        told = torch.cat([_rows(texts, parents), behind[:, :, None]], dim=2)
        done = _rows(torch.cat([F.pad(done, (0, 1), value=NOTHING), told], dim=1), at)
        finished = torch.cat([finished, counts], dim=1).gather(1, at)
        scores, on = (best + _out(hits)).topk(beams)
        parents, chosen = parents.gather(1, on), chosen.gather(1, on)
        texts = torch.cat([_rows(texts, parents), chosen[:, :, None]], dim=2)
        if self.decoding.early_stopping == "never" and penalty > 0:
            made = most.float() ** penalty
        worst = torch.where(finished, done_scores.amin(1, keepdim=True), _OUT)
        hopeful = hopeful & (scores[:, :1] / made > worst).any(1, keepdim=True)
        going = hopeful
        if self.decoding.early_stopping == "full":
            going = going & ~finished.all(1, keepdim=True)
        return going.any(), chosen, parents, [scores, texts, done, done_scores, finished, hopeful]


def _out(which: Tensor) -> Tensor:
    return which.float() * _OUT


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Of (B, n, T) the rows at (B, m)."""
    return x.gather(1, at[:, :, None].expand(-1, -1, x.shape[2]))


def _searching(found: Loaded, decoding: Decoding) -> Any:
    """The whole graph."""
    both = isinstance(found.model, Seq2Seq)
    blocks = range(stacks(found.model.config)[-1].depth)
    kept = [f"{block}.{part}" for block in blocks for part in ("key", "value")]
    memory = [f"source.{name}" for name in kept] if both else []
    moving = [*_CHANGING, *([] if both else ["mask"]), *kept]
    begins, turns = _Begins(found, decoding.beams).eval(), _Turn(found, decoding).eval()
    batch = torch.export.Dim("batch", min=1, max=1 << 12)
    prompt = torch.export.Dim("prompt", min=1, max=positions(found.model.config)[0])
    given = torch.ones(_BATCH, _PROMPT, dtype=torch.int64), torch.ones(_BATCH, _PROMPT, dtype=torch.int64)
    program = torch.export.export(
        begins, given, dynamic_shapes=({0: batch, 1: prompt}, {0: batch, 1: prompt}), strict=False
    )
    first = [f"first.{name}" for name in (*_FIRST, "mask", *kept, *memory)]
    begin = in_onnx(program, ["input_ids", "attention_mask"], first).model_proto
    inputs = ["step", "max_tokens", *_CHANGING, "mask", *kept, *memory]
    turn = _turn_of(turns, begins(*given), len(kept), inputs, ["going", *(f"next.{name}" for name in moving)])
    return _looped(begin, turn, moving, ["mask", *memory] if both else [])


def _turn_of(turns: _Turn, first: list[Tensor], kept: int, inputs: list[str], outputs: list[str]) -> Any:
    """The graph of one turn, from the example of what the first one is given."""
    count = len(_FIRST)
    texts = torch.full((_BATCH, turns.beams, _MADE), NOTHING)
    state = [*first[:2], texts, texts.clone(), *first[3:count]]
    mask, before, memory = first[count], first[count + 1 :][:kept], first[count + 1 :][kept:]
    batch = torch.export.Dim("batch", min=1, max=1 << 12)
    made, past = (torch.export.Dim(name, min=1, max=1 << 20) for name in ("made", "past"))
    columns = torch.export.Dim("columns", min=1, max=1 << 20)
    if memory:  # one column, as an encoder–decoder has after its first pass, would be taken for a constant
        before = [F.pad(each, (0, 0, 0, _KEPT - 1)) for each in before]
    texts_sizes, row_sizes = {0: batch, 2: made}, {0: batch}
    sizes = [row_sizes, row_sizes, texts_sizes, texts_sizes, row_sizes, row_sizes, row_sizes]
    shapes = (
        None, None, sizes, {0: batch, 2: columns}, [{0: batch, 3: past}] * len(before),
        [{0: batch, 3: columns}] * len(memory),
    )  # fmt: skip
    given = (torch.tensor(1), torch.tensor(9), state, mask, before, memory)
    program = torch.export.export(turns, given, dynamic_shapes=shapes, strict=False)
    return in_onnx(program, inputs, outputs).model_proto


def _looped(begin: Any, turn: Any, carried: Sequence[str], seen: Sequence[str]) -> Any:
    """`begin`, then a loop of `turn`: of its inputs, `carried` go from turn to turn, and `seen` stay as they are."""
    onnx, _ = packages()
    helper, prefixed = onnx.helper, onnx.compose.add_prefix_graph
    graph, body = begin.graph, prefixed(turn.graph, "turn.")
    prefixed(graph, "begin.", rename_inputs=False, rename_outputs=False, inplace=True)
    held = {_content(one): one.name for one in graph.initializer}
    outside = {"turn.max_tokens": "max_tokens", **{f"turn.{name}": f"first.{name}" for name in seen}}
    for one in body.initializer:  # weights of both passes are kept once
        alike = held.setdefault(_content(one), one.name)
        if alike == one.name:
            graph.initializer.append(one)
        outside[one.name] = alike
    _renamed(body, outside)
    inputs = {one.name: one for one in body.input}
    going = helper.make_tensor_value_info("turn.goes", onnx.TensorProto.BOOL, [])
    given = [inputs["turn.step"], going, *(inputs[f"turn.{name}"] for name in carried)]
    for one in (*given[2:], *body.output[1:]):
        _of_any_size(one)
    turns = helper.make_graph(body.node, "turn", given, body.output)
    named = {"done_scores": "scores"}
    loop = helper.make_node(
        "Loop",
        ["max_tokens", "", *(f"first.{'texts' if name == 'done' else name}" for name in carried)],
        [named.get(name, f"last.{name}") for name in carried],
        name="search",
        body=turns,
    )
    kinds = {one.name: one.type.tensor_type.elem_type for one in graph.output}
    numbers = {"skipped": [1], "end": [(1 << 63) - 1], "axis": [2]}
    graph.initializer.extend(
        helper.make_tensor(f"told.{name}", onnx.TensorProto.INT64, [1], value)
        for name, value in numbers.items()
    )
    told = helper.make_node(
        "Slice", ["last.done", *(f"told.{name}" for name in numbers)], ["sequences"], name="told"
    )
    graph.node.extend([loop, told])
    del graph.output[:]
    graph.input.append(helper.make_tensor_value_info("max_tokens", onnx.TensorProto.INT64, []))
    shapes = {"sequences": ("texts", ["batch", None, None]), "scores": ("done_scores", ["batch", None])}
    graph.output.extend(
        helper.make_tensor_value_info(name, kinds[f"first.{of}"], shape)
        for name, (of, shape) in shapes.items()
    )
    return begin


def _content(one: Any) -> tuple[int, tuple[int, ...], str]:
    """What a tensor of a graph holds, told apart from others by a hash."""
    raw = one.raw_data if one.HasField("raw_data") else one.SerializeToString() + one.name.encode()
    return one.data_type, tuple(one.dims), hashlib.sha256(raw).hexdigest()


def _renamed(graph: Any, names: dict[str, str]) -> None:
    """Let nodes of a graph, and of those inside it, read what has another name."""
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _renamed(inner, names)


def _of_any_size(value: Any) -> None:
    """Forget the names of sizes, which differ from turn to turn."""
    for size in value.type.tensor_type.shape.dim:
        size.ClearField("dim_param")


def _save(model: Any, path: Path) -> None:
    onnx, _ = packages()
    large = sum(len(one.raw_data) for one in model.graph.initializer) > _LARGE
    path.with_name(f"{path.name}.data").unlink(
        missing_ok=True
    )  # else weights would be put behind those that lie there
    onnx.save_model(model, str(path), save_as_external_data=large, location=f"{path.name}.data")


def _tried(path: Path, found: Loaded, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """Scores of the texts of drawn prompts of several lengths, as ONNX Runtime and as our own search find them."""
    run, draw = opened(path), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, found.model.config.vocabulary, (_TEXTS, _LONGEST), generator=draw)
    both, steps = isinstance(found.model, Seq2Seq), torch.tensor(_STEPS)
    lengths = [_LONGEST - row for row in range(_TEXTS)]
    mask = (torch.arange(_LONGEST) < torch.tensor(lengths)[:, None]).long()
    mask = mask if both else mask.flip(1)
    scores = run({"input_ids": tokens, "attention_mask": mask, "max_tokens": steps})[1]
    rows = [row[row_mask.bool()].tolist() for row, row_mask in zip(tokens, mask)]
    prompts = Prompts.of(rows, start=found.start if both else None, device=tokens.device)
    settings = replace(decoding, max_tokens=_STEPS, best=decoding.beams, bias=found.never)
    return scores, search(found.model, prompts, settings, ends=found.ends).scores
