"""The demo's second subject: BERT as transformers has it, small and untrained, on texts of unequal lengths."""

from __future__ import annotations

import datetime
import inspect
import itertools
import logging
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import EnvironmentProblem
from penstock.tasks import Loss

WORDS, TEXTS, MOST = 8_000, 16, 128
"""Words of the vocabulary, texts of a batch, and words of a text at most."""


def bert() -> tuple[nn.Module, dict[str, Tensor], Loss]:
    """A BERT of two blocks with three classes, its batch of padded texts, and its loss: a factory for the ladder.

    The texts are docstrings of Python's standard library, in words, of which most samples have few: more than half of
    the tokens are padding. A word's number is its checksum, for what a text says changes no speed. Raises
    EnvironmentProblem without transformers.
    """
    try:
        import transformers
    except ImportError:
        raise EnvironmentProblem(
            "BERT as transformers has it needs the package transformers. Install it with: pip install 'penstock[hf]'."
        ) from None
    # Every eighth, so that they are of more than one class.
    texts = list(itertools.islice(_docstrings(), 0, 8 * TEXTS, 8))
    lengths = torch.tensor([min(len(words), MOST) for words in texts])
    numbers = [
        torch.tensor([zlib.crc32(word.encode()) % WORDS + 1 for word in words[:MOST]]) for words in texts
    ]
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS + 1, num_labels=3, num_hidden_layers=2, hidden_size=256, num_attention_heads=4,
            intermediate_size=1024,
        )
    )  # fmt: skip
    ids = nn.utils.rnn.pad_sequence(numbers, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(texts)) % 3}, _loss


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _docstrings() -> Iterator[list[str]]:
    """Docstrings of some modules and of str that have more than three words, in words."""
    for home in (str, logging, datetime, inspect):
        for _, member in sorted(vars(home).items()):
            words = (inspect.getdoc(member) or "").split()
            if len(words) > 3:
                yield words
