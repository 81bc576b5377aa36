"""ONNX that generates: keys and values of earlier tokens are inputs, and those of all tokens are outputs.

Names are those of Hugging Face's optimum; I is the number of a block. The first pass gets none, tensors of P = 0.

- A decoder is `decoder_with_past_model.onnx`: from `input_ids` (B, N), `attention_mask` (B, P + N) and
  `past_key_values.I.key` and `.value` (B, G, P, K) to `logits` (B, N, V), `present.I.key` and `.value`
  (B, G, P + N, K).
- The encoder of an encoder–decoder is `encoder_model.onnx`: from `input_ids` (B, M) and `attention_mask` (B, M) to
  `present.I.encoder.key` and `.value` (B, G, M, K), which are made once for a source.
- Its decoder is `decoder_with_past_model.onnx`: from `input_ids` (B, N), `encoder_attention_mask` (B, M) and
  `past_key_values.I.decoder.key`, `.decoder.value`, `.encoder.key` and `.encoder.value` to `logits` (B, N, V),
  `present.I.decoder.key` and `.decoder.value`.

Masks are int64, 0 for padding. A decoder's padding may be anywhere, and positions count the other tokens. A source's is
last.

Shapes: B texts, N new tokens, P tokens before them, M tokens of a source; G KV heads, K features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.decode.past import NEVER, Columns, Past
from penstock.errors import ConfigError
from penstock.export.onnx_file import Run, write_onnx
from penstock.models.model import Model
from penstock.models.positions import Rotation, rotations

Pairs = list[tuple[Tensor, Tensor]]
DECODER, ENCODER = "decoder_with_past_model.onnx", "encoder_model.onnx"
_BATCH, _NEW, _KEPT, _SOURCE = 2, 3, 4, 5
"""Sizes of the example; other sizes work as well."""
_TEXTS, _PROMPT, _STEPS = 3, 6, 2
"""Sizes of the run that checks."""


def write_cached(module: nn.Module, target: Path) -> tuple[Path, Tensor, Tensor]:
    """Write a decoder or an encoder–decoder: the decoder's file, and logits of a prompt's last token and of two more as
    ONNX Runtime and as the model give them, for prompts and sources of several lengths.

    Raises ConfigError for a model that does not generate.
    """
    if not isinstance(module, Model) or not module.graph.generates:
        raise ConfigError(
            "This model generates no text from texts alone, whose keys and values a cache keeps; choose --to onnx."
        )
    target.mkdir(parents=True, exist_ok=True)
    path = target / DECODER
    with torch.no_grad():
        if not module.graph.remembered:
            outputs, expected = _continue_texts(_write_decoder(module, path), module)
        else:
            source = _write_source(module, target / ENCODER)
            outputs, expected = _translate_texts(source, _write_target(module, path), module)
    return path, outputs, expected


class _JoinedColumns(Columns):
    """A cache that is passed in and out: new columns are appended to those of the input."""

    def __init__(self, before: Pairs) -> None:
        super().__init__(0, 0)
        self.before = before

    def keep(self, layer: int, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        if self.before:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.before[layer], (k, v)))
        self.layers.append((k, v))
        return k, v


class _TensorPast(Past):
    """A `Past` that is made of tensors in one pass, so that a program of it takes any sizes."""

    def __init__(self, before: Pairs, mask: Tensor, new: int, positions: int) -> None:
        """`mask` (B, P + N) is 0 for padding, and `new` is N."""
        rows, width = mask.shape
        store, device = _JoinedColumns(before), mask.device
        super().__init__(store, rows=rows, columns=width, positions=positions, device=device)
        real = mask != 0
        places = (real.long().cumsum(1) - 1).clamp(min=0)
        self.places, self.width = places[:, width - new :], width
        self.column_places = places.masked_fill(~real, NEVER)

    def recall(self, memory: Pairs, mask: Tensor) -> None:
        """Set keys and values of a source, and which of its tokens (B, M) are no padding."""
        self.memory, self.remembers = memory, True
        self.remember(mask.sum(1), mask.shape[1])

    def _turns(self, stack: Any) -> dict[str, Rotation]:
        # A table of all positions, which serves many passes, would be made again in each.
        return rotations(stack.turns, self.places, sequence_first=stack.sequence_first)


class _Generating(nn.Module):
    """One pass of a model as a function of tensors alone."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.positions = model, model.graph.written[-1].most
        assert model.graph.text is not None
        self.text = model.graph.text.name
        self.source = model.graph.input_of(model.graph.remembered[0]).name if model.graph.remembered else ""


class _Continues(_Generating):
    """A decoder's pass."""

    def forward(self, tokens: Tensor, mask: Tensor, before: list[Tensor]) -> list[Tensor]:
        width = before[0].shape[2] + tokens.shape[1]
        # Taken by number, the mask's own size need not be known to be the sum of the two.
        mask = mask.index_select(1, torch.arange(width, device=mask.device))
        past = _TensorPast(_in_pairs(before), mask, tokens.shape[1], self.positions)
        return [self.model.logits(**{self.text: tokens}, past=past), *_flat(past.store.layers)]


class _Reads(_Generating):
    """Keys and values of a source in every block of the decoder: the pass of a first token, of which nothing else is
    used.
    """

    def forward(self, source: Tensor, mask: Tensor) -> list[Tensor]:
        first = torch.zeros_like(source[:, :1])
        past = _TensorPast([], torch.ones_like(first), 1, self.positions)
        self.model(**{self.source: source, self.text: first}, lengths=mask.sum(1), past=past)
        return _flat(past.memory)


class _Translates(_Generating):
    """A pass of an encoder–decoder's decoder."""

    def forward(self, tokens: Tensor, mask: Tensor, before: list[Tensor]) -> list[Tensor]:
        every = _in_pairs(before)
        rows, new = tokens.shape
        width = before[0].shape[2] + new
        past = _TensorPast(every[::2], tokens.new_ones(rows, width), new, self.positions)
        past.recall(every[1::2], mask)
        return [self.model.logits(**{self.text: tokens}, past=past), *_flat(past.store.layers)]


def _write_decoder(model: Model, path: Path) -> Run:
    tokens = _words(model, _BATCH, _NEW)
    mask = torch.ones(_BATCH, _KEPT + _NEW, dtype=torch.int64)
    before = _empty(model, _BATCH, _KEPT)
    batch, new, past = _dims(model)
    shapes = (
        {0: batch, 1: new},
        {0: batch, 1: torch.export.Dim("total", min=1)},
        [{0: batch, 2: past}] * len(before),
    )
    names = _names(model, "key", "value")
    return _write_program(
        _Continues(model), path, (tokens, mask, before), shapes,
        ["input_ids", "attention_mask", *_prefixed("past_key_values", names)], ["logits", *_prefixed("present", names)],
    )  # fmt: skip


def _write_source(model: Model, path: Path) -> Run:
    batch, source = _dims(model)[0], _source_size(model)
    example = _words(model, _BATCH, _SOURCE), torch.ones(_BATCH, _SOURCE, dtype=torch.int64)
    names = _names(model, "encoder.key", "encoder.value")
    shapes = ({0: batch, 1: source}, {0: batch, 1: source})
    return _write_program(
        _Reads(model), path, example, shapes, ["input_ids", "attention_mask"], _prefixed("present", names)
    )


def _write_target(model: Model, path: Path) -> Run:
    batch, new, past = _dims(model)
    source = _source_size(model)
    tokens, mask = _words(model, _BATCH, _NEW), torch.ones(_BATCH, _SOURCE, dtype=torch.int64)
    before = _interleaved(_empty(model, _BATCH, _KEPT), _empty(model, _BATCH, _SOURCE))
    sizes = [{0: batch, 2: past}] * 2 + [{0: batch, 2: source}] * 2
    shapes = ({0: batch, 1: new}, {0: batch, 1: source}, sizes * (len(before) // 4))
    every = _names(model, "decoder.key", "decoder.value", "encoder.key", "encoder.value")
    own_names = _names(model, "decoder.key", "decoder.value")
    return _write_program(
        _Translates(model), path, (tokens, mask, before), shapes,
        ["input_ids", "encoder_attention_mask", *_prefixed("past_key_values", every)],
        ["logits", *_prefixed("present", own_names)],
    )  # fmt: skip


def _write_program(
    module: nn.Module, path: Path, example: tuple[Any, ...], shapes: Any, inputs: list[str], outputs: list[str]
) -> Run:  # fmt: skip
    program = torch.export.export(module.eval(), example, dynamic_shapes=shapes, strict=False)
    return write_onnx(program, path, inputs, outputs)


def _continue_texts(run: Run, model: Model) -> tuple[Tensor, Tensor]:
    """Logits (B, steps, V) of texts whose padding comes first, from a prompt in one pass and two single tokens; and the
    model's, of each text alone and at once."""
    tokens = _words(model, _TEXTS, _PROMPT + _STEPS)
    mask = (torch.arange(_PROMPT + _STEPS) >= torch.arange(_TEXTS)[:, None]).long()
    names = _prefixed("past_key_values", _names(model, "key", "value"))
    cached, outputs = _empty(model, _TEXTS, 0), []
    for begin, end in _passes(_PROMPT):
        inputs = {"input_ids": tokens[:, begin:end], "attention_mask": mask[:, :end]}
        logits, *cached = run({**inputs, **dict(zip(names, cached, strict=True))})
        outputs.append(logits[:, -1])
    text = _Generating(model).text
    expected = [
        model.logits(**{text: tokens[row : row + 1, row:]})[0, -_STEPS - 1 :] for row in range(_TEXTS)
    ]
    return torch.stack(outputs, dim=1), torch.stack(expected)


def _translate_texts(read: Run, run: Run, model: Model) -> tuple[Tensor, Tensor]:
    """Logits of targets to sources of several lengths, whose padding comes last, in the form of `_continue_texts`."""
    source, target = _words(model, _TEXTS, _PROMPT), _words(model, _TEXTS, 2 + _STEPS)
    lengths = _PROMPT - torch.arange(_TEXTS)
    mask = (torch.arange(_PROMPT) < lengths[:, None]).long()
    memory = read({"input_ids": source, "attention_mask": mask})
    every = _names(model, "decoder.key", "decoder.value", "encoder.key", "encoder.value")
    cached, outputs = _empty(model, _TEXTS, 0), []
    for begin, end in _passes(2):
        inputs = {"input_ids": target[:, begin:end], "encoder_attention_mask": mask}
        past = zip(_prefixed("past_key_values", every), _interleaved(cached, memory), strict=True)
        logits, *cached = run({**inputs, **dict(past)})
        outputs.append(logits[:, -1])
    return torch.stack(outputs, dim=1), model(source, target, lengths)[:, -_STEPS - 1 :]


def _passes(prompt: int) -> Iterable[tuple[int, int]]:
    """Where the tokens of each pass begin and end."""
    return [(0, prompt), *((prompt + step, prompt + step + 1) for step in range(_STEPS))]


def _dims(model: Model) -> tuple[Any, Any, Any]:
    """Texts, new tokens and tokens before them, as sizes that may vary."""
    most = model.graph.written[-1].most
    sizes = (("batch", 1, 1 << 12), ("tokens", 1, most), ("past", 0, most))
    batch, new, past = (torch.export.Dim(name, min=least, max=size) for name, least, size in sizes)
    return batch, new, past


def _source_size(model: Model) -> Any:
    return torch.export.Dim("source", min=1, max=model.graph.remembered[0].most)


def _words(model: Model, rows: int, count: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocabulary, (rows, count), generator=draw)


def _empty(model: Model, rows: int, columns: int) -> list[Tensor]:
    """Keys and values of `columns` columns for each block, all zero."""
    return [
        torch.zeros(rows, layer.kv_heads, columns, layer.head_width)
        for run in model.graph.written
        for layer in run.stack.layers
        for _ in range(2)
    ]


def _names(model: Model, *endings: str) -> list[str]:
    """Names of what each block that a text goes through has."""
    depth = sum(run.stack.depth for run in model.graph.written)
    return [f"{block}.{name}" for block in range(depth) for name in endings]


def _prefixed(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


def _in_pairs(tensors: Sequence[Tensor]) -> Pairs:
    """Keys and values of each block, of one behind the other."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _flat(pairs: Pairs) -> list[Tensor]:
    """Keys and values one behind the other."""
    return [tensor for pair in pairs for tensor in pair]


def _interleaved(own: Sequence[Tensor], memory: Sequence[Tensor]) -> list[Tensor]:
    """Each block's own keys and values, then those of the source."""
    return [
        tensor
        for pairs in zip(_in_pairs(own), _in_pairs(memory), strict=True)
        for tensor in _flat(list(pairs))
    ]
