"""Tasks on words: what is hidden or taken out, and what targets are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.texts import SPECIALS, TEXT, Letters, Windows
from penstock.config.model import PRESETS, DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.plan import Padding
from penstock.config.run import DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.tasks.masked_words import MaskedWords, PrepareMasked
from penstock.tasks.next_token import NextToken
from penstock.tasks.span_corruption import PrepareSpans, Sizes, SpanCorruption, sizes_of
from penstock.tasks.text import SIZES, documents_of, first_samples, rounded

CPU = torch.device("cpu")
END = Letters.end
DECODER = DecoderConfig(vocabulary=64, sequence=16, width=16, depth=1, heads=2, mlp_width=16)


def _host(source: Windows, count: int, *, start: int = 0) -> HostBatch:
    host = first_samples(source, count)
    return HostBatch(host.samples, host.ids, host.positions + start, host.bad)


def test_batches_are_cut_to_few_sizes() -> None:
    sizes = {rounded(length, 100) for length in range(101)}
    assert len(sizes) <= SIZES
    assert max(sizes) == 100
    assert all(rounded(length, 100) >= length for length in range(101))
    assert rounded(3, 5) == 3


def test_documents_are_told_apart_by_their_ends() -> None:
    tokens = np.array([[30, 31, END, 32, END], [30, 31, 32, 33, 34]])
    documents = documents_of(tokens, END)
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert documents_of(tokens[1:], END) is None
    assert documents_of(tokens, None) is None


def test_targets_are_the_tokens_that_follow() -> None:
    source = Windows(TEXT, 17, stride=16, ends=50)
    batch = NextToken().prepare(source, DECODER)(first_samples(source, 4), CPU)
    tokens, documents, targets = batch.inputs
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(targets[:-1, -1], tokens[1:, 0])  # each token is a target once
    assert documents is not None
    assert float(batch.count) == targets.numel() == batch.tokens == batch.bytes


DOCUMENTS = [f"w {'a bc ' * (number % 5)}end" for number in range(40)]


def _unpacked(task: NextToken | MaskedWords, model: Any, folder: Path) -> Source:
    (folder / "train.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in DOCUMENTS))
    return task.read(DataConfig(source=f"text:{folder}", packed=False), model, Bytes(), "train")


def test_unpacked_documents_are_learnt_as_if_each_were_alone(tmp_path: Path) -> None:
    config = replace(DECODER, sequence=32, vocabulary=Bytes.size)
    torch.manual_seed(0)
    model = create(config).double()
    source = _unpacked(NextToken(), config, tmp_path)
    assert source.lengths is not None
    batch = NextToken().prepare(source, config)(first_samples(source, 9), CPU)
    alone = torch.zeros((), dtype=torch.double)
    for text in DOCUMENTS[:9]:
        tokens = torch.tensor([[*text.encode(), Bytes.end]])
        alone += model(tokens[:, :-1], None, tokens[:, 1:])
    torch.testing.assert_close(model(*batch.inputs), alone)
    targets = sum(map(len, DOCUMENTS[:9]))
    assert float(batch.count) == batch.tokens == targets  # type: ignore[arg-type]
    assert batch.bytes == pytest.approx(targets * source.bytes_per_token)  # type: ignore[attr-defined]
    assert batch.inputs[0].shape == (9, 28)  # 25 tokens is the longest, of sizes that are multiples of 4
    assert "│" in NextToken().sample(model.float().eval(), source, CPU)


def test_bits_per_byte_and_perplexity_of_a_loss_of_one_bit() -> None:
    found = NextToken().metrics(3, [np.log(2.0) * 60, 60.0, 120.0])
    assert found == pytest.approx({"loss": np.log(2.0), "perplexity": 2.0, "bits_per_byte": 0.5})
    assert NextToken().metrics(1, [1e6, 1.0, 0.0])["perplexity"] == pytest.approx(np.exp(80.0))


# -- masked words


def _hidden(seed: int, positions: list[int], length: int = 60) -> tuple[Any, Any, Any, Any]:
    source = Windows(TEXT, length, ends=47)
    tokens = first_samples(source, len(positions)).samples.numpy()
    return tokens, *PrepareMasked(Letters(), seed).hide(tokens, np.array(positions))


def test_whole_words_are_hidden_and_no_more_than_15_percent() -> None:
    tokens, seen, columns, targets = _hidden(0, list(range(40)))
    assert columns.shape == (40, 9)
    starts = Letters().word_starts()
    rates = []
    for row in range(40):
        hidden = set(columns[row][targets[row] != -100].tolist())
        rates.append(len(hidden) / 60)
        assert len(hidden) <= 9
        assert [tokens[row][c] for c in columns[row] if c in hidden] == targets[row][
            targets[row] != -100
        ].tolist()
        for column in hidden:
            assert tokens[row][column] != END
            # Its word is hidden with it, to both sides.
            if column + 1 < 60 and not starts[tokens[row][column + 1]] and tokens[row][column + 1] != END:
                assert column + 1 in hidden
            if column and not starts[tokens[row][column]] and tokens[row][column - 1] != END:
                assert column - 1 in hidden
        left = [c for c in range(60) if c not in hidden]
        assert (seen[row][left] == tokens[row][left]).all()
    assert 0.08 < np.mean(rates) <= 0.15


def test_most_hidden_tokens_become_the_mask() -> None:
    _, seen, columns, targets = _hidden(1, list(range(40)))
    there = targets != -100
    shown = np.take_along_axis(seen, columns, 1)[there]
    assert 0.7 < (shown == Letters.mask).mean() < 0.9
    assert 0.04 < (shown == targets[there]).mean() < 0.2


def test_what_is_hidden_is_a_pure_function_of_seed_and_position() -> None:
    tokens, seen, *_ = _hidden(0, [5, 6, 7])
    alone = PrepareMasked(Letters(), 0).hide(tokens[1:2], np.array([6]))
    assert (alone[0] == seen[1:2]).all()
    assert (_hidden(0, [5, 6, 7])[1] == seen).all()
    assert (_hidden(1, [5, 6, 7])[1] != seen).any()
    assert (_hidden(0, [105, 106, 107])[1] != seen).any()  # another epoch


def test_rows_point_at_what_was_hidden() -> None:
    source = Windows(TEXT, 30, ends=47)
    batch = PrepareMasked(Letters(), 0)(first_samples(source, 5), CPU)
    tokens, lengths, segments, documents, targets, rows = batch.inputs
    assert lengths is segments is None
    assert documents is not None and documents.shape == tokens.shape == (5, 32)  # noqa: PT018
    assert (tokens[:, 0] == Letters.classify).all()
    assert (tokens[:, -1] == Letters.separator).all()
    told = targets != -100
    shown = tokens.flatten()[rows[told]]
    assert ((shown == Letters.mask) | (shown == targets[told]) | (shown < Letters.size)).all()
    assert (shown == Letters.mask).any()
    assert float(batch.count) == told.sum()


@pytest.mark.parametrize("padding", ["keep", "remove"])
def test_words_of_unpacked_documents_are_hidden_as_if_each_were_alone(
    tmp_path: Path, padding: Padding
) -> None:
    config = EncoderConfig(vocabulary=Bytes.size, sequence=40, width=16, depth=2, heads=2, mlp_width=16)
    torch.manual_seed(0)
    model = create(config).double()
    set_switch(model, "padding", padding)
    source = _unpacked(MaskedWords(), config, tmp_path)
    host = first_samples(source, 9)
    prepare = MaskedWords().prepare(source, config)
    batch = prepare(host, CPU)
    tokens, lengths, _, documents, *_ = batch.inputs
    assert documents is None
    assert lengths.tolist() == [len(text) + 3 for text in DOCUMENTS[:9]]  # type: ignore[union-attr]
    assert tokens.shape == (9, 30)  # 28 is the longest, of sizes that are multiples of 5
    assert batch.tokens == int(lengths.sum())
    losses = torch.zeros((), dtype=torch.double)
    for i in range(9):
        one = prepare(HostBatch(host.samples[i : i + 1], host.ids[[i]], host.positions[[i]], ()), CPU)
        hidden = int((one.inputs[4] != -100).sum())
        assert 0 < hidden <= round(0.15 * (len(DOCUMENTS[i]) + 1))
        kept = one.inputs[0][:, : len(DOCUMENTS[i]) + 3]
        assert torch.equal(tokens[i, : kept.shape[1]], kept[0])
        assert (kept[0, 0], kept[0, -1]) == (Bytes.classify, Bytes.separator)
        losses += model(kept, None, None, None, *one.inputs[4:])
    torch.testing.assert_close(model(*batch.inputs), losses)
    assert "[" in MaskedWords().sample(model.eval(), source, CPU)


def test_a_tokenizer_without_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EncoderConfig(width=16, depth=1, heads=2, mlp_width=16)
    with pytest.raises(ConfigError, match=r"model\.head is none, but masked words need logits"):
        MaskedWords().fit(replace(model, head="none"), Windows(TEXT, 16))
    monkeypatch.setattr(Letters, "mask", None)
    with pytest.raises(ConfigError, match="has no mask token"):
        MaskedWords().fit(model, Windows(TEXT, 16))


# -- span corruption


def test_a_corrupted_text_can_be_put_together_again() -> None:
    source = Windows(TEXT, 40)
    prepare = PrepareSpans(Letters(), 0)
    host = first_samples(source, 30)
    texts = host.samples.numpy()
    sources, targets = prepare.corrupt(texts, host.positions)
    sizes = Sizes.of(40)
    assert (sizes.noise, sizes.spans) == (6, 2)
    assert sources.shape == (30, 40 - 6 + 2 + 1)
    assert targets.shape == (30, 6 + 2 + 1)
    assert len({tuple(row) for row in (sources < SPECIALS).tolist()}) > 10
    for text, left, gone in zip(texts, sources.tolist(), targets.tolist(), strict=True):
        spans: dict[int, list[int]] = {}
        for number in gone[:-1]:
            if number in Letters.sentinels:
                spans[number] = []
            else:
                spans[list(spans)[-1]].append(number)
        assert list(spans) == list(Letters.sentinels[:2])
        assert all(spans.values())
        whole = [n for number in left[:-1] for n in spans.get(number, [number])]
        assert whole == text.tolist()
        assert left[-1] == gone[-1] == END


def test_spans_are_taken_out_of_packed_text_only() -> None:
    with pytest.raises(ConfigError, match=r"data\.packed is false"):
        SpanCorruption().read(DataConfig(packed=False), PRESETS["t5-tiny"], Bytes(), "train")


def test_spans_are_a_pure_function_of_seed_and_position() -> None:
    host = first_samples(Windows(TEXT, 40), 6)
    texts = host.samples.numpy()
    whole = PrepareSpans(Letters(), 3).corrupt(texts, host.positions)
    alone = PrepareSpans(Letters(), 3).corrupt(texts[4:5], np.array([4]))
    assert (alone[0] == whole[0][4:5]).all()
    assert (PrepareSpans(Letters(), 4).corrupt(texts, host.positions)[0] != whole[0]).any()
    assert (PrepareSpans(Letters(), 3).corrupt(texts, host.positions + 600)[0] != whole[0]).any()


@pytest.mark.parametrize(("sequence", "target"), [(16, 16), (64, 64), (64, 8), (512, 114)])
def test_texts_fill_the_model(sequence: int, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "sentinels", tuple(range(7, 60)))
    found = sizes_of(Seq2SeqConfig(sequence=sequence, decoder_sequence=target), Letters())
    source = found.text - found.noise + found.spans + 1
    assert source <= sequence
    assert found.noise + found.spans + 1 <= target
    assert source >= sequence - 1 or found.noise + found.spans + 1 >= target - 1


def test_a_model_without_room_or_sentinels_is_refused() -> None:
    with pytest.raises(ConfigError, match="have no room for a text with a gap"):
        sizes_of(Seq2SeqConfig(sequence=2, decoder_sequence=2), Letters())
    with pytest.raises(ConfigError, match="have 28 gaps, but the tokenizer letters has 13 sentinels"):
        sizes_of(Seq2SeqConfig(sequence=512), Letters())
