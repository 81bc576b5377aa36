"""Files of text, and tokenizers from outside.

Text is documents and rows of every format, as `--data text:PATH` and `pairs:PATH` read them. Tokenizers are a
`tokenizer.json` with its settings, sentencepiece models, and Marian's two with a table.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import logging
import lzma
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.doors import Case, Door
from fuzz.mutate import altered_files
from helpers import marian

_LINES = [{"text": f"document {number}\nof two lines", "label": number % 3} for number in range(12)]
_PAIRS = [f"first {number}\tsecond\t{number % 2}" for number in range(12)]


@functools.cache
def _seeds() -> dict[str, bytes]:
    json_lines = "\n".join(map(json.dumps, _LINES)).encode()
    plain = "A first line.\nÜber naïve Straßen,\t雪国\r\n".encode() * 20
    table = "premise\thypothesis\tlabel\n" + "\n".join(_PAIRS)
    quoted = 'source,target\n"a, ""b""\nc",d\n' + "x,y\n" * 9
    return {
        "text/fail/a.txt": plain,
        "text/skip/a.txt": plain * 10,
        "text/skip/a.jsonl": (json_lines + b"\n") * 12,
        "single/fail/a.jsonl": json_lines,
        "single/skip/a.json": json.dumps(_LINES * 12, indent=1).encode(),
        "pair/fail/a.tsv": table.encode(),
        "pair/skip/a.tsv": table.encode() + b"\n" + "\n".join(_PAIRS * 12).encode(),
        "translation/fail/a.csv": quoted.encode(),
        "text/fail/a.txt.gz": gzip.compress(plain),
        "text/fail/a.jsonl.bz2": bz2.compress(json_lines),
        "single/skip/a.jsonl.xz": lzma.compress(json_lines),
        "single/fail/a.parquet": _parquet(),
        "text/skip/a.parquet": _parquet(),
    }


def _parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [line[name] for line in _LINES * 9] for name in ("text", "label")}
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out, compression="snappy")
    return out.getvalue()


def _enter(case: str, data: bytes) -> None:
    import numpy as np

    from penstock.config.run import DataConfig
    from penstock.data.text.rows import open_rows
    from penstock.data.text.tokenizers import Bytes
    from penstock.data.text.tokens import open_tokens

    logging.disable(logging.CRITICAL)
    form, policy, name = case.split("/")
    for folder in ("set", "../cache/text"):
        shutil.rmtree(folder, ignore_errors=True)
    Path("set").mkdir()
    Path("set", name).write_bytes(data)
    config = DataConfig(source=f"text:set/{name}", bad_rows=policy)  # type: ignore[arg-type]
    if form == "text":
        source = open_tokens(config, Bytes(), "train", length=16)
    else:
        source = open_rows(config, Bytes(), "train", form=form, length=16)  # type: ignore[arg-type, assignment]
    out = np.empty(4, source.sample)
    source.read_into(np.arange(4) % len(source), out)


def _made() -> st.SearchStrategy[Case]:
    """Lines and cells that are well formed, and mean nonsense."""
    cell = st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ("", "-", "nan", "1", "2.5", "1e400", '"', '""', '"\n"', "\r", "\t", "\0", "\ufeff", "\u2028")
        ),
        st.just("x" * 70_000),
    )
    rows = st.lists(st.lists(cell, min_size=1, max_size=4), max_size=12)
    head = st.sampled_from((["premise", "hypothesis", "label"], ["text", "label"], ["source", "target"], []))

    def table(separator: str) -> st.SearchStrategy[bytes]:
        return st.builds(
            lambda head, rows: "\n".join(separator.join(row) for row in [head, *rows]).encode(
                "utf-8", "replace"
            ),
            head,
            rows,
        )

    value = st.one_of(
        cell, st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers(), max_size=3)
    )
    line = st.dictionaries(st.sampled_from(("text", "label", "source", "other")), value, max_size=4)
    lines = st.lists(line, max_size=12).map(lambda lines: "\n".join(map(json.dumps, lines)).encode())
    form = st.sampled_from(("text", "single", "pair", "translation"))
    policy = st.sampled_from(("fail", "skip"))
    by_ending = st.one_of(
        st.tuples(st.just("a.tsv"), table("\t")),
        st.tuples(st.just("a.csv"), table(",")),
        st.tuples(st.just("a.jsonl"), lines),
        st.tuples(st.just("a.txt"), table(" ")),
    )
    return st.tuples(form, policy, by_ending).map(
        lambda case: (f"{case[0]}/{case[1]}/{case[2][0]}", case[2][1])
    )


_MODELS = Path(__file__).parents[1] / "data" / "text" / "sentencepiece"
_HERE = Path("tokenizer")


@functools.cache
def _tokenizers() -> dict[str, bytes]:
    from penstock.data.text.tokenizers import Bytes

    Bytes().save(Path("bytes"))
    tree = json.loads(Path("bytes/tokenizer.json").read_bytes())
    tree["model"]["vocab"] = {word: number for word, number in tree["model"]["vocab"].items() if number < 40}
    tree["added_tokens"] = tree["added_tokens"][:4]
    for number, token in enumerate(tree["added_tokens"]):
        token["id"] = 40 + number
    return {
        "tokenizer.json": json.dumps(tree).encode(),
        "tokenizer_config.json": b'{"pad_token": "<pad>", "eos_token": {"content": "<end>"}, "unk_token": null}',
        "tokenizer.model": (_MODELS / "unigram.model").read_bytes(),
        "bpe.model": (_MODELS / "bpe.model").read_bytes(),
        "source.spm": marian.model(marian.SOURCE),
        "vocab.json": json.dumps(marian.NUMBERS).encode(),
    }


def _enter_tokenizer(name: str, data: bytes) -> None:
    from penstock.config.run import DataConfig
    from penstock.data.text.open import open_tokenizer

    logging.disable(logging.CRITICAL)
    shutil.rmtree(_HERE, ignore_errors=True)
    _HERE.mkdir()
    if name == "tokenizer_config.json":
        (_HERE / "tokenizer.json").write_bytes(_tokenizers()["tokenizer.json"])
    if name in ("source.spm", "vocab.json"):
        marian.write_files(_HERE)
    (_HERE / name).write_bytes(data)
    at = _HERE / name if name == "bpe.model" else _HERE
    tokenizer = open_tokenizer(DataConfig(tokenizer=str(at)))
    numbers = tokenizer.encode(["Some text, naïve 雪\n", ""])
    tokenizer.encode_target([">>de<< Some text"])
    tokenizer.decode([*numbers[0].tolist(), 3, tokenizer.size - 1])
    tokenizer.word_starts()
    tokenizer.save(Path("saved"))


DOORS = {
    "text": Door(
        seeds=_seeds, enter=_enter, made=_made,
        tokens=(b"\n", b"\r\n", b"\xff", b"\xed\xa0\x80", b"\0", b'"', b"\t", b"\xef\xbb\xbf", b"\\ud800", b"[" * 3000),
    ),
    "tokenizer": Door(
        seeds=_tokenizers, enter=_enter_tokenizer, made=lambda: altered_files(_tokenizers()),
        tokens=(b'"(a+)+$"', b"\x0a\xff\x7f", b'{"type": "Unigram"}'),
    ),
}  # fmt: skip
