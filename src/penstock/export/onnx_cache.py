"""ONNX for generation: keys and values of earlier tokens are inputs, those of all tokens are outputs.

Names are those of Hugging Face's optimum; I is the number of a block. The first pass gets tensors with P = 0.

- A decoder is `decoder_with_past_model.onnx`: from `input_ids` (B, N), `attention_mask` (B, P + N) and
  `past_key_values.I.key` and `.value` (B, G, P, K) to `logits` (B, N, V), `present.I.key` and `.value`
  (B, G, P + N, K).
- The encoder of an encoder–decoder is `encoder_model.onnx`: from `input_ids` (B, M) and `attention_mask` (B, M) to
  `present.I.encoder.key` and `.value` (B, G, M, K), which are made once for a source.
- Its decoder is `decoder_with_past_model.onnx`: from `input_ids` (B, N), `encoder_attention_mask` (B, M) and
  `past_key_values.I.decoder.key`, `.decoder.value`, `.encoder.key` and `.encoder.value` to `logits` (B, N, V),
  `present.I.decoder.key` and `.decoder.value`.

Masks are int64, 0 for padding. A decoder's padding may be anywhere; positions count only other tokens. A source's
padding is last.

Shapes: B texts, N new tokens, P tokens before them, M tokens of a source; G KV heads, K features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.decode.kv_cache import NEVER, Columns, KVCache
from penstock.errors import ConfigError
from penstock.export.onnx_file import Run, write_onnx
from penstock.models.embeddings import Rotation, rotations
from penstock.models.model import Model

Pairs = list[tuple[Tensor, Tensor]]
DECODER, ENCODER = "decoder_with_past_model.onnx", "encoder_model.onnx"
_BATCH, _NEW, _KEPT, _SOURCE = 2, 3, 4, 5
"""Sizes of the example; other sizes work as well."""
_TEXTS, _PROMPT, _STEPS = 3, 6, 2
"""Sizes of the checking run."""


def write_cached(module: nn.Module, target: Path) -> tuple[Path, Tensor, Tensor]:
    """Write a decoder or an encoder–decoder: returns the decoder's file, and the logits of ONNX Runtime and of the
    model for a prompt's last token and two more, for prompts and sources of several lengths.

    Raises ConfigError for a model that cannot generate.
    """
    if not isinstance(module, Model) or not module.graph.generates:
        raise ConfigError(
            "This model does not generate text from text alone, so nothing is cached for it; choose --to onnx."
        )
    if any(run.stack.latent for run in module.graph.runs):
        raise ConfigError(
            "This model caches latents in place of keys and values, for which optimum has no names; choose --to onnx."
        )
    target.mkdir(parents=True, exist_ok=True)
    path = target / DECODER
    with torch.no_grad():
        read = _write_source(module, target / ENCODER) if module.graph.remembered else None
        outputs, expected = _continue_texts(read, _write_decoder(module, path), module)
    return path, outputs, expected


class _JoinedColumns(Columns):
    """A cache that is passed in and out: new columns are appended to those of the input."""

    def __init__(self, before: Pairs) -> None:
        super().__init__(0, 0)
        self.before = before

    def keep(self, layer: int, k: Tensor, v: Tensor, past: KVCache) -> tuple[Tensor, Tensor]:
        if self.before:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.before[layer], (k, v)))
        self.layers.append((k, v))
        return k, v


class _TensorCache(KVCache):
    """A `KVCache` made from tensors within one pass, so that its exported program accepts any sizes."""

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
        """Set keys and values of a source, and the mask (B, M) of its tokens that are not padding."""
        self.memory, self.remembers = memory, True
        self.remember(mask.sum(1), mask.shape[1])

    def _turns(self, stack: Any) -> dict[str, Rotation]:
        # A table of all positions, which is meant for many passes, would be made again in each.
        return rotations(stack.turns, self.places, sequence_first=stack.sequence_first)


class _Pass(nn.Module):
    """One pass of a model's decoder as a function of tensors only."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.positions = model, model.graph.written[-1].max_tokens
        assert model.graph.text is not None
        self.text = model.graph.text.name
        self.source = model.graph.input_of(model.graph.remembered[0]).name if model.graph.remembered else ""

    def forward(self, tokens: Tensor, mask: Tensor, before: list[Tensor]) -> list[Tensor]:
        """`mask` (B, P + N) is of the tokens; for an encoder–decoder it is (B, M), of the source, whose keys and values
        follow each block's own."""
        every, new = _in_pairs(before), tokens.shape[1]
        width = before[0].shape[2] + new
        if self.source:
            past = _TensorCache(every[::2], tokens.new_ones(tokens.shape[0], width), new, self.positions)
            past.recall(every[1::2], mask)
        else:
            # With indices, the exporter need not know that the mask's size is the sum of the two.
            mask = mask.index_select(1, torch.arange(width, device=mask.device))
            past = _TensorCache(every, mask, new, self.positions)
        return [self.model.logits(**{self.text: tokens}, past=past), *_flat(past.store.layers)]


class _SourcePass(_Pass):
    """Keys and values of a source in every block of the decoder, from the pass of a first token whose logits are not
    used.
    """

    def forward(self, source: Tensor, mask: Tensor) -> list[Tensor]:  # type: ignore[override]
        first = torch.zeros_like(source[:, :1])
        past = _TensorCache([], torch.ones_like(first), 1, self.positions)
        self.model(**{self.source: source, self.text: first}, lengths=mask.sum(1), past=past)
        return _flat(past.memory)


def _write_decoder(model: Model, path: Path) -> Run:
    source = bool(model.graph.remembered)
    batch, new, past = _dims(model)
    before, sizes = _empty(model, _BATCH, _KEPT), [{0: batch, 2: past}] * 2
    mask_size, total = _KEPT + _NEW, torch.export.Dim("total", min=1)
    if source:
        before, mask_size, total = (
            _with_memory(before, _empty(model, _BATCH, _SOURCE)), _SOURCE, _source_size(model),
        )  # fmt: skip
        sizes += [{0: batch, 2: total}] * 2
    example = _words(model, _BATCH, _NEW), torch.ones(_BATCH, mask_size, dtype=torch.int64), before
    shapes = {0: batch, 1: new}, {0: batch, 1: total}, sizes * (len(before) // len(sizes))
    inputs = ["input_ids", "encoder_attention_mask" if source else "attention_mask", *_past_names(model)]
    outputs = ["logits", *_names(model, "present", "decoder." if source else "")]
    return _write_program(_Pass(model), path, example, shapes, inputs, outputs)


def _write_source(model: Model, path: Path) -> Run:
    size = {0: _dims(model)[0], 1: _source_size(model)}
    example = _words(model, _BATCH, _SOURCE), torch.ones(_BATCH, _SOURCE, dtype=torch.int64)
    outputs = _names(model, "present", "encoder.")
    return _write_program(
        _SourcePass(model), path, example, (size, size), ["input_ids", "attention_mask"], outputs
    )


def _write_program(
    module: nn.Module, path: Path, example: tuple[Any, ...], shapes: Any, inputs: list[str], outputs: list[str]
) -> Run:  # fmt: skip
    program = torch.export.export(module.eval(), example, dynamic_shapes=shapes, strict=False)
    return write_onnx(program, path, inputs, outputs)


def _continue_texts(read: Run | None, run: Run, model: Model) -> tuple[Tensor, Tensor]:
    """Logits (B, steps, V) from a prompt in one pass and two single tokens, and the model's of all tokens at once.
    Texts have padding in front, and the model computes each text alone; sources (for `read`) have it at the end."""
    prompt = _PROMPT if read is None else 2
    tokens, cached = _words(model, _TEXTS, prompt + _STEPS), _empty(model, _TEXTS, 0)
    source, lengths = _words(model, _TEXTS, _PROMPT), _PROMPT - torch.arange(_TEXTS)
    real = (torch.arange(_PROMPT) < lengths[:, None]).long()
    memory = None if read is None else read({"input_ids": source, "attention_mask": real})
    mask = (torch.arange(prompt + _STEPS) >= torch.arange(_TEXTS)[:, None]).long()
    outputs = []
    for begin, end in [(0, prompt), *((prompt + step, prompt + step + 1) for step in range(_STEPS))]:
        masks = {"attention_mask": mask[:, :end]} if memory is None else {"encoder_attention_mask": real}
        past = cached if memory is None else _with_memory(cached, memory)
        named = dict(zip(_past_names(model), past, strict=True))
        logits, *cached = run({"input_ids": tokens[:, begin:end], **masks, **named})
        outputs.append(logits[:, -1])
    if read is not None:
        return torch.stack(outputs, dim=1), model(source, tokens, lengths)[:, -_STEPS - 1 :]
    text = _Pass(model).text
    expected = [
        model.logits(**{text: tokens[row : row + 1, row:]})[0, -_STEPS - 1 :] for row in range(_TEXTS)
    ]
    return torch.stack(outputs, dim=1), torch.stack(expected)


def _dims(model: Model) -> tuple[Any, Any, Any]:
    """Number of texts, of new tokens and of earlier tokens, as sizes that can vary."""
    most = model.graph.written[-1].max_tokens
    sizes = (("batch", 1, 1 << 12), ("tokens", 1, most), ("past", 0, most))
    batch, new, past = (torch.export.Dim(name, min=least, max=size) for name, least, size in sizes)
    return batch, new, past


def _source_size(model: Model) -> Any:
    return torch.export.Dim("source", min=1, max=model.graph.remembered[0].max_tokens)


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


def _names(model: Model, prefix: str, *kinds: str) -> list[str]:
    """Names of the keys and values of each block that a text passes, for each kind."""
    depth = sum(run.stack.depth for run in model.graph.written)
    parts = [kind + part for kind in kinds for part in ("key", "value")]
    return [f"{prefix}.{block}.{part}" for block in range(depth) for part in parts]


def _past_names(model: Model) -> list[str]:
    kinds = ("decoder.", "encoder.") if model.graph.remembered else ("",)
    return _names(model, "past_key_values", *kinds)


def _in_pairs(tensors: Sequence[Tensor]) -> Pairs:
    """Keys and values as a pair for each block, from a flat sequence."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _flat(pairs: Pairs) -> list[Tensor]:
    """Keys and values of all blocks as a flat sequence."""
    return [tensor for pair in pairs for tensor in pair]


def _with_memory(own: Sequence[Tensor], memory: Sequence[Tensor]) -> list[Tensor]:
    """Each block's own keys and values, followed by the source's."""
    return [
        tensor for pairs in zip(_in_pairs(own), _in_pairs(memory), strict=True) for tensor in _flat([*pairs])
    ]
