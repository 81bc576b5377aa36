"""Models of transformers for `penstock ladder --model transformers_models:NAME`, with a batch of real texts' lengths.

Texts are docstrings of Python's standard library, in words. A word's number is its checksum, because what a text says
changes no speed. Weights are drawn.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ladder_text import docstrings

WORDS = 30_000


def _texts(samples: int, most: int) -> tuple[Tensor, Tensor]:
    """Numbers of words and a mask, (samples, most): every 50th docstring of four words or more."""
    long_enough = (words for text in docstrings() if len(words := text.split()) >= 4)
    ids = torch.zeros(samples, most, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, words in enumerate(itertools.islice(long_enough, 0, 50 * samples, 50)):
        numbers = [zlib.crc32(word.encode()) % WORDS + 1 for word in words[:most]]
        ids[row, : len(numbers)], mask[row, : len(numbers)] = torch.tensor(numbers), 1
    longest = int(mask.sum(dim=1).max())
    return ids[:, :longest], mask[:, :longest]


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


def bert_classes() -> tuple[nn.Module, Any, Any]:
    """BERT-base with three classes, 8 texts of at most 128 words."""
    import transformers

    ids, mask = _texts(8, 128)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(8) % 3}, _loss


def bert_words() -> tuple[nn.Module, Any, Any]:
    """BERT-base with masked words, 15 % of them, in the same texts."""
    import transformers

    ids, mask = _texts(8, 128)
    chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15) & (mask > 0)
    batch = {
        "input_ids": ids.masked_fill(chosen, 103),
        "attention_mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
    }
    return transformers.BertForMaskedLM(transformers.BertConfig()), batch, _loss


def gpt2() -> tuple[nn.Module, Any, Any]:
    """GPT-2 small, 4 × 128 words without padding."""
    import transformers

    ids = torch.randint(0, 50_257, (4, 128), generator=torch.Generator().manual_seed(0))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), {"input_ids": ids, "labels": ids}, _loss
