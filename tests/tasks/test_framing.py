"""What pretrained models are tuned on: batches as transformers makes them, from the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.bart.modeling_bart import shift_tokens_right

from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.data.text.open import found_in
from penstock.infer.load import loaded
from penstock.infer.text import prompt_numbers
from penstock.kernels.cross_entropy import IGNORED
from penstock.models.convert import model_in
from penstock.tasks.text import first_samples
from penstock.tasks.translation import Translation

ROWS = [
    ("one two", "un deux"), ("three", "trois un trois"), ("two", "deux"), ("one", "un"), ("three one", "un"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """BART as transformers saves it: texts are `<s> … </s>`, and the decoder begins with `</s>`."""
    words = [
        "<s>", "<pad>", "</s>", "<unk>", *sorted({w for row in ROWS for text in row for w in text.split()}),
    ]  # fmt: skip
    library = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(
        vocab_size=len(words), d_model=8, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=12, decoder_start_token_id=2, **sizes,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_batch_is_what_transformers_would_tune_on(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    for split in ("train", "val"):
        (rows / f"{split}.tsv").write_text(
            "".join(f"{source}\t{target}\n" for source, target in [("source", "target"), *ROWS])
        )
    task, model = Translation(str(folder)), model_in(folder)
    assert model is not None
    source = task.open(DataConfig(source=f"pairs:{rows}"), model, "train")
    batch = task.prepare(source, model)(first_samples(source, len(ROWS)), torch.device("cpu"))

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    texts, targets = zip(*ROWS, strict=True)
    made = theirs(list(texts), text_target=list(targets), padding=True, return_tensors="pt")
    width, length = made["input_ids"].shape[1], made["labels"].shape[1]
    tokens, begun, lengths, asked = batch.inputs[:4]
    torch.testing.assert_close(tokens[:, :width], made["input_ids"])
    assert lengths.tolist() == made["attention_mask"].sum(1).tolist()
    torch.testing.assert_close(begun[:, :length], shift_tokens_right(made["labels"], 1, 2))
    torch.testing.assert_close(
        asked[:, :length], made["labels"].masked_fill(made["labels"] == theirs.pad_token_id, IGNORED)
    )


def test_texts_and_pairs_have_around_them_what_transformers_puts_there(folder: Path) -> None:
    """RoBERTa's kind has two tokens between the texts of a pair."""
    theirs, tokenizer = PreTrainedTokenizerFast.from_pretrained(folder), found_in(folder)
    assert tokenizer is not None
    one, two = (part.tolist() for part in tokenizer.encode(["one two", "three"]))
    frame = tokenizer.frame()
    assert [*frame.before, *one, *frame.behind] == theirs("one two").input_ids
    frame = tokenizer.frame(2)
    assert frame.between == (2, 2)
    assert [*frame.before, *one, *frame.between, *two, *frame.behind] == theirs("one two", "three").input_ids


def test_a_source_is_given_as_transformers_gives_it(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert prompt_numbers("three one", found_in(folder), source=True) == theirs("three one").input_ids
    opened = loaded(folder, Plan(), weights="auto", tokenizer=None)
    assert (opened.start, opened.ends) == (2, (2,))


def test_a_run_of_its_own_begins_with_the_token_for_it(folder: Path) -> None:
    """Without weights that say otherwise, `<s>` is the decoder's first token, and not the target's once more."""
    tokenizer = Translation().tokenizer(DataConfig(tokenizer=str(folder)))
    assert (tokenizer.start, tokenizer.opening(), tokenizer.target_opening()) == (0, (0,), ())
    told = Translation(str(folder)).tokenizer(DataConfig())
    assert (told.start, told.opening(), told.target_opening()) == (2, (0,), (0,))
