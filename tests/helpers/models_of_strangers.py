"""Small models in transformers' own format, with tokenizers of the kinds that people bring."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["The river runs to the sea. " * 3, "hello world stop END 😀 café 你好", "def main(): return 0"] * 3


def byte_level(folder: Path, template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE of few merges, as GPT-2's, in a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    made.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def split_by(expression: str, folder: Path) -> Any:
    """A tokenizer of bytes that cuts texts by a regular expression first, in a folder."""
    from penstock.data.text.tokenizers import Bytes, LibraryTokenizer

    Bytes().save(folder)
    part = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    text = (folder / "tokenizer.json").read_text()
    return LibraryTokenizer(json.dumps(json.loads(text) | {"pre_tokenizer": part}), "made", {})


def sentencepiece(folder: Path) -> Any:
    """A unigram of sentencepiece's kind, with bytes to fall back on: the decoder drops the space of a first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁The", "▁river", "▁runs", "▁to", "s", "▁", "▁STOP", "a"]
    pieces = [(word, -1.0 if len(word) > 1 and word[0] == "▁" else -5.0) for word in words]
    specials = [(word, -5.0) for word in ("<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)))]
    made = Tokenizer(models.Unigram([*specials, *pieces], unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def gpt2(folder: Path, *, ends_after: str | None = None, positions: int = 256) -> Path:
    """A GPT-2 with random weights, which would end after one text; its folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_level(folder)
    torch.manual_seed(0)
    size = len(tokenizer)
    config = GPT2Config(
        vocab_size=size, n_positions=positions, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
        if ends_after is not None:
            ids = torch.tensor([tokenizer(ends_after)["input_ids"]])
            features = model.transformer(ids).last_hidden_state[0, -1]
            model.lm_head.weight[tokenizer.eos_token_id] = features / features.norm() * 4
    model.save_pretrained(folder)
    return folder


def chain(folder: Path) -> Path:
    """A GPT-2 with the tokenizer of `sentencepiece`, which goes on: The river runs tos STOP; its folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = sentencepiece(folder)
    size = len(tokenizer)
    width = -(-size // 4) * 4
    config = GPT2Config(
        vocab_size=size, n_positions=128, n_embd=width, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    order = ["▁The", "▁river", "▁runs", "▁to", "s", "▁STOP", "</s>"]
    ids = tokenizer.convert_tokens_to_ids(order)
    following = dict(itertools.pairwise(ids))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight.copy_(torch.eye(size, width))
        for number in range(size):
            model.lm_head.weight[following.get(number, 1), number] = 2.0
    model.save_pretrained(folder)
    return folder
