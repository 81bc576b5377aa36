from __future__ import annotations

import gzip
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.config.run import DataConfig
from penstock.data.text.build import write_pack
from penstock.data.text.open import open_tokenizer
from penstock.data.text.tokenizers import Bytes
from penstock.data.text.tokens import TokenSource, open_tokens
from penstock.errors import ConfigError, DataError


def opened(source: str, split: str = "train", length: int = 8, **options: object) -> TokenSource:
    settings: dict = {name: options.pop(name) for name in ("stride",) if name in options}
    data = DataConfig(source=source, **options)  # type: ignore[arg-type]
    return open_tokens(data, open_tokenizer(data), split, length=length, **settings)  # type: ignore[arg-type]


def read(source: TokenSource, *indices: int) -> np.ndarray:
    out = np.empty(len(indices), source.sample)
    source.read_into(np.array(indices), out)
    return out


def everything(source: TokenSource) -> list[int]:
    return read(source, *range(len(source))).reshape(-1).tolist()


def test_documents_follow_each_other_with_an_end_behind_each(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "ab"}\n\n{"text": "cde", "other": 1}\n')
    (tmp_path / "val.txt").write_text("held out")
    source = opened(f"text:{tmp_path}", length=7)
    end = Bytes.end
    assert everything(source) == [97, 98, end, 99, 100, 101, end]
    assert source.bytes_per_token == 5 / 7
    assert source.lengths is None
    val = opened(f"text:{tmp_path}", "val")
    assert val.tokenizer.decode(everything(val)) == "held out"


def test_windows_overlap_as_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 400)
    source = opened(f"text:{tmp_path}", length=9, stride=8)
    assert len(source) == (source.tokens - 9) // 8 + 1
    assert read(source, 0, 5).shape == (2, 9)


def test_a_split_is_told_by_each_text_and_loses_nothing(tmp_path: Path) -> None:
    lines = [f'{{"text": "document {number}"}}' for number in range(1000)]
    with gzip.open(tmp_path / "all.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    both = [opened(f"text:{tmp_path}", split, length=1) for split in ("train", "val")]
    texts = [
        bytes(n if n < 256 else 10 for n in everything(source)).decode().split("\n")[:-1] for source in both
    ]
    assert 20 < len(texts[1]) < 80
    assert sorted(texts[0] + texts[1]) == sorted(f"document {number}" for number in range(1000))


def test_what_packing_saves_is_counted_by_document(tmp_path: Path) -> None:
    lines = [f'{{"text": "{number:0{1 + number % 7}}"}}' for number in range(1000)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    for split in ("train", "val"):
        source = opened(f"text:{tmp_path}", split, length=4)
        lengths = [len(one) for one in "".join(chr(n) for n in everything(source)).split(chr(Bytes.end))[:-1]]
        padded = sum(-(-(length + 1) // 4) * 4 for length in lengths)
        assert source.unpacked_padding == pytest.approx(1 - source.tokens / padded, abs=0.01)
    (tmp_path / "book.txt").write_text("z" * 400)
    book = opened(f"text:{tmp_path}/book.txt", length=10)
    assert book.unpacked_padding == pytest.approx(1 - book.tokens / 390)


@pytest.mark.parametrize("split", ["train", "val"])
def test_unpacked_documents_begin_samples_and_lose_nothing(tmp_path: Path, split: str) -> None:
    texts = [f"{number:0{1 + number % 9}}" for number in range(600)]
    (tmp_path / "all.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    packed = everything(opened(f"text:{tmp_path}", split, length=1))  # type: ignore[arg-type]
    documents = [f"{text}\n" for text in "".join(chr(min(n, 256)) for n in packed).split("\u0100")[:-1]]
    source = opened(f"text:{tmp_path}", split, length=5, stride=4, packed=False)  # type: ignore[arg-type]
    found = []
    for row, length in zip(read(source, *range(len(source))), source.lengths, strict=True):
        tokens = row[row >= 0]
        assert (row[len(tokens) :] == -1).all()
        assert length == len(tokens) - 1 > 0
        found.append("".join("\n" if n == Bytes.end else chr(n) for n in tokens))
    expected = [text[i : i + 5] for text in documents for i in range(0, len(text) - 1, 4)]
    assert found == expected
    assert source.unpacked_padding is None
    shares = opened(f"text:{tmp_path}", split, length=5, stride=4).unpacked_padding  # type: ignore[arg-type]
    assert shares == pytest.approx(1 - float(np.mean(source.lengths)) / 4)


def test_unpacked_sets_are_mixed_by_weight_and_grouped_by_length(tmp_path: Path) -> None:
    for name, size in (("a", 40), ("b", 10)):
        lines = [f'{{"text": "{name * (1 + number % 6)}"}}' for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    names = f"text:{tmp_path}/a.jsonl=1,text:{tmp_path}/b.jsonl=3"
    source = opened(names, length=8, packed=False, group_by_length=True)
    rows = read(source, *range(len(source)))
    assert (rows[:, 0] == ord("b")).sum() == 3 * (rows[:, 0] == ord("a")).sum()
    np.testing.assert_array_equal(source.lengths, (rows >= 0).sum(axis=1))
    assert source.group_by_length
    (tmp_path / "none.jsonl").write_text("\n".join(['{"text": ""}'] * 3))
    with pytest.raises(DataError, match=r"none\.jsonl.*(no document of more than 1|no text)"):
        opened(f"text:{tmp_path}/none.jsonl", length=9, stride=8, packed=False)


def test_few_documents_give_the_end_of_the_text_to_validation(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"{number:09d}\n" for number in range(400)))
    train, val = (opened(f"text:{tmp_path}", split, length=1) for split in ("train", "val"))
    assert (train.tokens, val.tokens) == (3801, 200)
    assert train.tokenizer.decode(everything(train) + everything(val)).endswith("000000399\n")


def test_sets_are_mixed_by_weight(tmp_path: Path) -> None:
    for name, size in (("a", 300), ("b", 100)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    source = opened(f"text:{tmp_path}/a.txt=1,text:{tmp_path}/b.txt=3", length=4)
    firsts = read(source, *range(len(source)))[:, 0]
    a = int((firsts == ord("a")).sum())
    assert a == (287 - 4) // 4 + 1, "the set that lasts longest is read once"
    assert len(source) == 4 * a
    assert source.tokens == 287 + 97


def test_the_standard_library_is_always_there() -> None:
    source = opened("auto", length=1024)
    assert len(source) > 2000
    assert len(opened("auto", "val", length=1024)) > 50
    assert source.bytes_per_token == pytest.approx(1, rel=1e-3)
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(read(again, 5), read(source, 5))


def test_what_is_made_once_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 40)
    opened(f"text:{tmp_path}/a.txt")
    monkeypatch.setattr("penstock.data.text.sources.write_pack", None)
    opened(f"text:{tmp_path}/a.txt")
    (tmp_path / "a.txt").write_text("other text" * 40)
    with pytest.raises(TypeError):
        opened(f"text:{tmp_path}/a.txt")


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("digits", ConfigError, "holds images, but this task takes text"),
        ("numbers", ConfigError, "this task takes continuous text"),
        ("text:nowhere", DataError, "nowhere"),
        ("pack:nowhere", DataError, "no packed text"),
    ],
)
def test_what_is_no_text_is_refused(source: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        opened(source)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="fewer than one sample of 8"):
        opened(f"text:{tmp_path}")


def test_ranks_that_start_together_tokenise_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 4000)
    made: list[Path] = []

    def counting(target: Path, *arguments: object) -> object:
        made.append(target)
        time.sleep(0.2)  # so that the others come meanwhile
        return write_pack(target, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.data.text.sources.write_pack", counting)
    with ThreadPoolExecutor(3) as ranks:
        sizes = {len(source) for source in ranks.map(lambda _: opened(f"text:{tmp_path}/a.txt"), range(3))}
    assert len(made) == len(sizes) == 1
