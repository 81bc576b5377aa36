"""The text of `data.source`: which data it names, and in which shares."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator

from penstock.boundary.files import quoted, shown
from penstock.boundary.images import EXTENSIONS
from penstock.config.convert import BadValue, Positive, convert, nearest
from penstock.config.removed import removed

SOURCES = ("auto", "digits", "mnist", "captions", "stdlib", "numbers", "names", "imagefolder", "text", "pairs",
           "pack", "hf")  # fmt: skip
_TABLES, _TEXTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet"), (".txt", ".text", ".md")
_WITHOUT_PATH = ("auto", "digits", "stdlib")
_WITH_PATH = ("mnist", "imagefolder", "text", "pairs", "pack", "hf")
_WEIGHTED = r"[^=]+=[0-9.]+"


def sources_of(text: str) -> tuple[tuple[str, float], ...]:
    """Each source and its share of the samples: those of `text:a=7,text:b=3` are 0.7 and 0.3."""
    if not re.fullmatch(f"{_WEIGHTED}(,{_WEIGHTED})+", text):
        return ((text, 1.0),)
    pairs = [part.rpartition("=") for part in text.split(",")]
    total = math.fsum(_weight(weight) for _, _, weight in pairs)
    return tuple((source, _weight(weight) / total if total else 0.0) for source, _, weight in pairs)


def _weight(text: str) -> float:
    """The number that a text writes; 0 for any other text."""
    try:
        return convert(text, Positive, text=True)  # type: ignore[no-any-return]
    except BadValue:
        return 0.0


def source_problems(text: str) -> Iterator[str]:
    """Every reason why `text` names no data."""
    parts = sources_of(text)
    for source, share in parts:
        kind, _, path = source.partition(":")
        if kind not in SOURCES or (kind in _WITH_PATH and not path) or (kind in _WITHOUT_PATH and path):
            yield (
                f"data.source is {quoted(source)}, but must be auto, digits, captions, stdlib, numbers, names, "
                "captions:PATH, mnist:PATH, imagefolder:PATH, text:PATH, pairs:PATH, pack:PATH or "
                f"hf:NAME.{removed('sources').get(kind) or likely_source(source) or nearest(kind, SOURCES)}"
            )
        elif share <= 0:
            yield f"data.source gives {quoted(source)} no weight; write a number above 0 after its `=`."
        elif len(parts) > 1 and kind in ("auto", "digits", "captions", "mnist", "imagefolder"):
            yield f"data.source names {quoted(source)} among several, but only texts are mixed by weight."


def likely_source(path: str) -> str:
    """` The folder … write imagefolder:…`: the prefix that a path lacks as a source, judged by its content; "" if
    nothing is. At most some hundred names are looked at."""
    named = shown(path)
    if os.path.isfile(path):
        if path.lower().endswith(_TABLES):
            return f" That is a table: write text:{named}, or pairs:{named} for rows of two texts."
        return f" That is a file: write text:{named} if it is text." if path.lower().endswith(_TEXTS) else ""
    if not os.path.isdir(path):
        return f" There is nothing at {named} either." if os.sep in path else ""
    names = {
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, files in itertools.islice(os.walk(path), 8)
        for name in files[:50]
        if name[0] != "."
    }
    kinds = Counter(os.path.splitext(name)[1].lower() for name in names)
    if any(os.path.basename(name) == "manifest.json" for name in names):
        return f" That is a pack: write pack:{named}."
    if any(kinds[kind] for kind in EXTENSIONS):
        if all(os.sep in name for name in names if name.lower().endswith(EXTENSIONS)):
            return f" That is a folder of class folders with images: write imagefolder:{named}."
        return f" That folder has images, but no folder for each class, which imagefolder:{named} needs."
    if kinds[".tar"]:
        return f" That folder has tar shards: pack them with `penstock pack {named} TARGET`, and write pack:TARGET."
    if any(kinds[kind] for kind in (*_TABLES, *_TEXTS)):
        return f" That is a folder of text: write text:{named}, or pairs:{named} for rows of two texts."
    return ""
