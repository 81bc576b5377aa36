"""Tokens that the data do not use, removed from a model and its tokenizer.

What is left of a tokenizer cuts every text of the data into the same pieces as before: the removed tokens were none of
its choices, nor on the way to one. Other texts are cut into smaller pieces, for letters and bytes stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.boundary.files import read_text, write_text
from penstock.compress.prune import keep_words
from penstock.data.source import Source
from penstock.data.text.open import MOST_BYTES
from penstock.data.text.tokenizers import LibraryTokenizer
from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained
from penstock.models.convert.files import read_json
from penstock.models.convert.pretrained import save_values

READ_AT_ONCE = 1024
"""Samples."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_OTHERS = ("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_NUMBERS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
            "forced_eos_token_id", "suppress_tokens", "bad_words_ids")  # fmt: skip
"""Entries of config.json and generation_config.json that are tokens."""


def trim(folder: Path, source: Any, target: Path) -> dict[str, int]:
    """Write the model in `folder` to `target` without the tokens that a source of text does not use; how many are left
    as `words`, `of` how many. Raises ConfigError for a source without text, and for a tokenizer that is none of those
    that `smaller_tokenizer` knows."""
    tokenizer = require_trimmable(getattr(source, "tokenizer", None), folder)
    file = folder / "tokenizer.json"
    text, kept = smaller_tokenizer(read_text(file, "The tokenizer", limit=MOST_BYTES), used_tokens(source))
    save_values(keep_words(from_pretrained(folder), kept), target, source=folder)
    _write_beside(text, kept, target)
    return {"words": len(kept), "of": tokenizer.size}


def require_trimmable(tokenizer: Any, folder: Path) -> LibraryTokenizer:
    """The tokenizer of a model's folder, if `trim` can make it smaller. Raises ConfigError."""
    one = isinstance(tokenizer, LibraryTokenizer) and not tokenizer.two_sided
    if not one or not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"trim needs one tokenizer.json with a vocabulary of its own, which {folder} has not; leave trim out."
        )
    return cast(LibraryTokenizer, tokenizer)


def used_tokens(source: Source) -> set[int]:
    """The numbers of all tokens in a source of text."""
    used: set[int] = set()
    for begin in range(0, len(source), READ_AT_ONCE):
        numbers = np.arange(begin, min(begin + READ_AT_ONCE, len(source)))
        read = np.empty(len(numbers), source.sample)
        source.read_into(numbers, read)
        names = read.dtype.names
        for part in [read] if names is None else [read[name] for name in names if read[name].ndim > 1]:
            used |= set(np.unique(part).tolist())
    return {number for number in used if number >= 0}


def smaller_tokenizer(text: str, used: set[int]) -> tuple[str, list[int]]:
    """A tokenizer.json with the used tokens, those on the way to them, special tokens, letters and bytes alone; and the
    old number of each token that is left.

    Raises ConfigError for a kind of vocabulary other than WordPiece, WordLevel, BPE and Unigram.
    """
    tree = json.loads(text)
    model = tree["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
    if kind not in ("WordPiece", "WordLevel", "BPE", "Unigram"):
        raise ConfigError(
            f"trim knows vocabularies of WordPiece, WordLevel, BPE and Unigram, not of {kind}; leave it out."
        )
    unigram = kind == "Unigram"
    numbers = {piece: i for i, (piece, _) in enumerate(model["vocab"])} if unigram else dict(model["vocab"])
    prefix = model.get("continuing_subword_prefix") or ""
    specials = {entry["id"] for entry in tree.get("added_tokens") or ()}
    if unigram and model.get("unk_id") is not None:
        specials.add(model["unk_id"])
    elif model.get("unk_token") in numbers:
        specials.add(numbers[model["unk_token"]])
    letters = {
        i for piece, i in numbers.items() if len(piece.removeprefix(prefix)) <= 1 or _BYTE.fullmatch(piece)
    }
    kept = {*used, *specials, *letters}
    merges = [
        tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model.get("merges") or ()
    ]
    parts: dict[int, set[int]] = {}
    for first, second in merges:
        whole = numbers.get(first + second.removeprefix(prefix))
        if whole is not None:
            parts.setdefault(whole, set()).update((numbers[first], numbers[second]))
    waiting = list(kept)
    while waiting:
        new = parts.get(waiting.pop(), set()) - kept
        kept |= new
        waiting += new
    order = sorted(kept)
    places = {old: new for new, old in enumerate(order)}
    if unigram:
        model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if i in kept]
        model["unk_id"] = places.get(model.get("unk_id"))
    else:
        model["vocab"] = {piece: places[i] for piece, i in numbers.items() if i in kept}
    if merges:
        model["merges"] = [
            pair for pair, (first, second) in zip(model["merges"], merges)
            if {numbers[first], numbers[second], numbers.get(first + second.removeprefix(prefix))} <= kept
        ]  # fmt: skip
    for entry in tree.get("added_tokens") or ():
        entry["id"] = places[entry["id"]]
    if tree.get("padding"):
        tree["padding"]["pad_id"] = places[tree["padding"]["pad_id"]]
    for processor in _processors(tree.get("post_processor")):
        for entry in (processor.get("special_tokens") or {}).values():
            entry["ids"] = [places[number] for number in entry["ids"]]
        for name in ("sep", "cls"):
            if name in processor:
                processor[name][1] = places[processor[name][1]]
    return json.dumps(tree, ensure_ascii=False), order


def _processors(tree: Any) -> Iterator[dict[str, Any]]:
    """A post-processor, and those that it is a sequence of."""
    if isinstance(tree, dict):
        yield tree
        for each in tree.get("processors") or ():
            yield from _processors(each)


def _write_beside(text: str, kept: list[int], target: Path) -> None:
    """The smaller tokenizer, and the new numbers of the tokens that files beside the weights name."""
    places = {old: new for new, old in enumerate(kept)}

    def renumbered(value: Any) -> Any:
        if isinstance(value, list):
            return [new for each in value if (new := renumbered(each)) is not None]
        return places.get(value) if isinstance(value, int) else value

    for name in _OTHERS:
        (target / name).unlink(missing_ok=True)
    write_text(target / "tokenizer.json", text)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (target / name).is_file():
            values = read_json(target / name)
            values.pop("added_tokens_decoder", None)
            changed = {key: renumbered(value) if key in _NUMBERS else value for key, value in values.items()}
            write_text(target / name, json.dumps(changed, indent=2) + "\n")
