"""Tokenizers from outside: `tokenizer.json` with its settings, sentencepiece models, and Marian's two with a table."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from helpers import marian

_MODELS = Path(__file__).parents[1] / "data" / "text" / "sentencepiece"
_HERE = Path("tokenizer")


@functools.cache
def _seeds() -> dict[str, bytes]:
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


def _enter(name: str, data: bytes) -> None:
    from penstock.config.run import DataConfig
    from penstock.data.text.open import open_tokenizer

    logging.disable(logging.CRITICAL)
    shutil.rmtree(_HERE, ignore_errors=True)
    _HERE.mkdir()
    if name == "tokenizer_config.json":
        (_HERE / "tokenizer.json").write_bytes(_seeds()["tokenizer.json"])
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


def _made() -> st.SearchStrategy[Case]:
    trees = {name: json.loads(data) for name, data in _seeds().items() if name.endswith(".json")}
    return st.one_of(
        *(
            st.tuples(st.just(name), altered_tree(tree).map(lambda tree: json.dumps(tree).encode()))
            for name, tree in trees.items()
        )
    )


DOOR = Door(
    seeds=_seeds, enter=_enter, made=_made, tokens=(b'"(a+)+$"', b"\x0a\xff\x7f", b'{"type": "Unigram"}')
)
