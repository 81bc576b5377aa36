"""A model that Penstock does not know, for the ladder: BERT of transformers, untrained, on texts of unequal lengths.

penstock ladder --model padded_texts:bert
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS, TEXTS, LONGEST = 8_000, 16, 128
"""Words of the vocabulary, texts of a batch, and words of a text at most."""


def bert() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """A BERT of two blocks with three classes, its batch of padded texts, and its loss: a factory for the ladder.

    The texts are words drawn at random, for what a text says changes no speed; the logarithms of their lengths scatter
    as those of sentences do, so that half of the tokens are padding.
    """
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.empty(TEXTS).log_normal_(3.8, 0.7, generator=drawn).long().clamp(4, LONGEST)
    texts = [torch.randint(1, WORDS + 1, (int(length),), generator=drawn) for length in lengths]
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS + 1, num_labels=3, num_hidden_layers=2, hidden_size=256, num_attention_heads=4,
            intermediate_size=1024,
        )
    )  # fmt: skip
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(texts)) % 3}
    return model, batch, lambda model, batch: model(**batch).loss
