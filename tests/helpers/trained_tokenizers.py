"""Small tokenizers of every kind of vocabulary, trained on a few lines of text."""

from __future__ import annotations

import pytest

LINES = [f"The turbine number {n} turned {n * n} times while {n + 3} men watched it." for n in range(120)]
_TRAINED_ON = [*LINES, *(f"Zebras quietly juxtapose vexing quartz boxes {n}" for n in range(80))]


def trained_tokenizer(kind: str) -> str:
    """The tokenizer.json of a kind of vocabulary, with a frame."""
    tokenizers = pytest.importorskip("tokenizers")
    models, trainers = tokenizers.models, tokenizers.trainers
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    common = {"vocab_size": 300, "special_tokens": specials, "show_progress": False}
    made, trainer = {
        "WordPiece": lambda: (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(**common)),
        "BPE": lambda: (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(**common)),
        "Unigram": lambda: (models.Unigram(), trainers.UnigramTrainer(unk_token="[UNK]", **common)),
        "WordLevel": lambda: (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(**common)),
    }[kind]()
    tokenizer = tokenizers.Tokenizer(made)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(_TRAINED_ON, trainer)
    numbers = [(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=numbers
    )
    return str(tokenizer.to_str())
