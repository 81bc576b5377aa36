"""Tokenizers, which turn text into token numbers. None of them imports torch, and all can be pickled.

`Bytes` needs nothing. `LibraryTokenizer` is any tokenizer of Hugging Face's `tokenizers`, which reads `tokenizer.json`.
sentencepiece models become one (see `sentencepiece.py`), and `penstock pack` trains one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import printable, quoted, write_text
from penstock.boundary.packages import package
from penstock.boundary.tokenizers import RETRIES, in_time, require_bounded, slow
from penstock.errors import ConfigError, DataError

Numbers = NDArray[np.int32]
_log = logging.getLogger(__name__)

MOST_TOKENS = 1 << 22
"""A vocabulary of more tokens is refused."""


class Frame(NamedTuple):
    """The special tokens that an encoder reads around one text, or around and between two."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    """Special tokens between two texts."""
    behind: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of special tokens."""
        return sum(map(len, self))


class Tokenizer(ABC):
    """Conversion of text to token numbers (0 … size − 1) and back."""

    name: str
    fingerprint: str
    """SHA-256 in hex. Tokenizers with the same fingerprint make the same numbers."""
    size: int
    pad: int
    """Token that pads rows. A tokenizer without one uses `end`, since lengths say what is padding."""
    unknown: int | None = None
    begin: int | None = None
    end: int | None = None
    """Token that ends a document, or the target of a translation."""
    separator: int | None = None
    classify: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    """Tokens that replace spans that were taken out (T5), the first span's first."""
    told_start: int | None = None
    """First token of the decoder, according to the weights that a run starts from."""
    two_sided: bool = False
    """Whether targets of translations are tokenised differently from sources, as by Marian."""

    chat_template: str | None = None
    """Template in Jinja that makes a text of the messages of a conversation."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """The numbers of each text, without special tokens."""

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Numbers, list[tuple[int, int]]]]:
        """The numbers of each text in which special tokens are spelled, and the characters [begin, end) of each number:
        for texts that a chat template made. Raises ConfigError for a tokenizer that cannot read them."""
        raise ConfigError(
            f"The tokenizer {self.name} does not read special tokens in a text, as chats need; use one with a "
            "tokenizer.json, or data.tokenizer=bytes."
        )

    def spelled(self) -> dict[str, str]:
        """Special tokens by their names in chat templates; an empty text for a token that the tokenizer lacks."""
        words, roles = self.words(), ("begin", "end", "unknown", "pad")
        numbers = {KEYS[role]: getattr(self, role) for role in roles}
        return {key: "" if number is None else words[number] for key, number in numbers.items()}

    def special_words(self) -> list[str]:
        """The spellings of the special tokens."""
        words = self.words()
        return [words[number] for number in self.specials]

    def encode_target(self, texts: Sequence[str]) -> list[Numbers]:
        """The numbers of texts that a model translates into: as by `encode`, unless the tokenizer is `two_sided`."""
        return self.encode(texts)

    @abstractmethod
    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some numbers. Special tokens are left out, and broken characters replaced."""

    def decode_rows(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row of numbers; those below 0 are padding."""
        return [self.decode([number for number in row if number >= 0]) for row in rows]

    def opening(self) -> tuple[int, ...]:
        """Special tokens before a text that a decoder continues, and before texts of a translation."""
        return ()

    def frame(self, texts: int = 1) -> Frame:
        """Special tokens of an encoder around one text, or around and between two, as far as the tokenizer has them."""
        begin = self.begin if self.classify is None else self.classify
        end = self.end if self.separator is None else self.separator
        first, last = (() if number is None else (number,) for number in (begin, end))
        return Frame(first, last if texts == 2 else (), last)

    def framed(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text with its `frame`, as an encoder reads it."""
        before, _, behind = self.frame()
        return [[*before, *numbers.tolist(), *behind] for numbers in self.encode(texts)]

    @property
    def start(self) -> int:
        """First token of an encoder–decoder's decoder: `told_start`, else `begin`, else the padding, as in T5."""
        if self.told_start is not None:
            return self.told_start
        return self.pad if self.begin is None else self.begin

    def target_opening(self) -> tuple[int, ...]:
        """Tokens that open a translation after `start`: the `opening`, where `start` is not repeated."""
        opening = self.opening()
        return opening[1:] if opening[:1] == (self.start,) else opening

    def word_starts(self) -> NDArray[np.bool_]:
        """Whether each token begins a word, (size,), for masking whole words. A space belongs to the word after it."""
        words = self.words()
        starts = np.ones(self.size, np.bool_)
        if sum(word.startswith("##") for word in words) > self.size // 100:  # inside words, by WordPiece
            starts[:] = [not word.startswith("##") for word in words]
        elif any(word.startswith(("▁", "Ġ")) for word in words):  # after a space, by other tokenizers
            starts[:] = [not _goes_on(word) for word in words]
        starts[list(self.specials)] = True
        return starts

    def words(self) -> list[str]:
        """The name of each token, as spelled in `tokenizer.json`; empty for a number without a token."""
        return [str(number) for number in range(self.size)]

    @abstractmethod
    def save(self, folder: Path, rows: int = 0) -> None:
        """Write the files from which transformers' AutoTokenizer reads it. If a model has more `rows` than tokens,
        the rest get names, because some programs want a token for each row."""

    @property
    def specials(self) -> tuple[int, ...]:
        """All special tokens."""
        named = (self.pad, self.unknown, self.begin, self.end, self.separator, self.classify, self.mask)
        return tuple(sorted({*(number for number in named if number is not None), *self.sentinels}))


class Bytes(Tokenizer):
    """The bytes of UTF-8: numbers 0 to 255, followed by the special tokens."""

    WORDS = ("<pad>", "<begin>", "<end>", "<separator>", "<classify>", "<mask>")
    SENTINELS = 100

    name = "bytes"
    size = 256 + len(WORDS) + SENTINELS
    fingerprint = hashlib.sha256(f"penstock bytes 1 {size}".encode()).hexdigest()
    pad, begin, end, separator, classify, mask = range(256, 256 + len(WORDS))
    sentinels = tuple(range(256 + len(WORDS), size))

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, numbers: Sequence[int]) -> str:
        return bytes(number for number in numbers if 0 <= number < 256).decode("utf-8", "replace")

    def word_starts(self) -> NDArray[np.bool_]:
        starts = np.ones(self.size, np.bool_)
        inside = [byte for byte in range(256) if byte >= 128 or chr(byte).isalnum() or byte == ord("_")]
        starts[inside] = False
        return starts

    def words(self) -> list[str]:
        letters = letters_of_bytes()
        extra = [f"<extra_{number}>" for number in range(self.SENTINELS)]
        return [*(letters[byte] for byte in range(256)), *self.WORDS, *extra]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Numbers, list[tuple[int, int]]]]:
        specials = {word: [number] for number, word in enumerate(self.words()) if number >= 256}
        encoded = []
        for text in texts:
            numbers: list[int] = []
            places: list[tuple[int, int]] = []
            at = 0
            for piece in re.split(_SPECIAL_OF_BYTES, text):
                for unit in [piece] if piece in specials else piece:
                    own = specials.get(unit, unit.encode("utf-8", "replace"))
                    numbers += own
                    places += [(at, at + len(unit))] * len(own)
                    at += len(unit)
            encoded.append((np.array(numbers, np.int32), places))
        return encoded

    def save(self, folder: Path, rows: int = 0) -> None:
        """Raises EnvironmentProblem without the package tokenizers, whose format this is."""
        library = tokenizers_library("Writing a tokenizer for transformers")
        words = self.words()
        tokenizer = library.Tokenizer(library.models.BPE({words[byte]: byte for byte in range(256)}, []))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.add_special_tokens(words[256:])
        # Bytes know all texts, but CTranslate2's converter asks for the token of what is unknown.
        settings = {**named_words(), "unk_token": self.WORDS[0], "penstock": self.fingerprint}
        settings |= {"chat_template": self.chat_template} if self.chat_template else {}
        _write(folder, tokenizer.to_str(), settings, range(self.size, rows))


def named_words() -> dict[str, str]:
    """The special tokens of `Bytes` by transformers' names."""
    roles = ("pad", "begin", "end", "separator", "classify", "mask")
    return {KEYS[role]: word for role, word in zip(roles, Bytes.WORDS, strict=True)}


_SPECIAL_OF_BYTES = re.compile(f"({'|'.join(Bytes.WORDS)}|<extra_[0-9]{{1,2}}>)")
SPECIAL_WORDS: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>"),
    "unknown": ("[UNK]", "<unk>"),
    "begin": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]"),
    "end": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]", "[SEP]"),
    "separator": ("[SEP]", "</s>"),
    "classify": ("[CLS]", "<s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Usual names of special tokens, for tokenizers that come without a list."""
KEYS = {
    "pad": "pad_token", "unknown": "unk_token", "begin": "bos_token", "end": "eos_token", "separator": "sep_token",
    "classify": "cls_token", "mask": "mask_token",
}  # fmt: skip
"""transformers' names for special tokens, in `tokenizer_config.json`."""
UNSAVED = ("auto_map", "added_tokens_decoder", "name_or_path")
"""Settings of `tokenizer_config.json` that are not true of a tokenizer that Penstock wrote."""
_SENTINEL = re.compile(r"<extra(?:_id)?_(\d{1,4})>")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`, from the text of its `tokenizer.json`."""

    def __init__(self, text: str, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """`settings` is the content of `tokenizer_config.json`, which says what the special tokens are. Raises
        DataError for anything else, and EnvironmentProblem without the package."""
        self.name = name
        self._text = text
        self._settings = dict(settings or {})
        self._libraries: dict[bool, Any] = {}
        template = self._settings.get("chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self._frames: dict[int, Frame] = {}
        vocabulary: dict[str, int] = self._loaded().get_vocab(with_added_tokens=True)
        if not vocabulary or max(vocabulary.values()) >= MOST_TOKENS:
            raise DataError(
                f"The tokenizer {name} has {'numbers beyond 4 million' if vocabulary else 'no tokens'}. "
                "Check that it is the right file."
            )
        self.size = max(vocabulary.values()) + 1
        numbers = {role: self._named(role, vocabulary) for role in KEYS}
        self.unknown, self.begin, self.mask = numbers["unknown"], numbers["begin"], numbers["mask"]
        self.separator, self.classify = numbers["separator"], numbers["classify"]
        # Without an end of its own (BERT), a document ends with what separates.
        self.end = numbers["end"] if numbers["end"] is not None else self.separator
        pad = numbers["pad"] if numbers["pad"] is not None else self.end
        self.pad = pad if pad is not None else 0
        sentinels = {
            int(match[1]): number
            for word, number in vocabulary.items()
            if (match := _SENTINEL.fullmatch(word))
        }
        self.sentinels = tuple(sentinels[key] for key in sorted(sentinels))
        roles = [self.end, self.pad, self.separator, self.classify, self.mask, self.begin, self.unknown]
        self.fingerprint = hashlib.sha256(json.dumps([text, roles]).encode()).hexdigest()

    def _named(self, role: str, vocabulary: Mapping[str, int]) -> int | None:
        setting = self._settings.get(KEYS[role])
        word = setting.get("content") if isinstance(setting, Mapping) else setting
        if isinstance(word, str) and word in vocabulary:
            return vocabulary[word]
        if KEYS[role] in self._settings and word is None:
            return None  # its settings say that it has none
        return next((vocabulary[word] for word in SPECIAL_WORDS[role] if word in vocabulary), None)

    def _loaded(self, *, marked: bool = False) -> Any:
        """The library's tokenizer. Text that happens to spell a special token stays text, unless it is `marked`."""
        if marked not in self._libraries:
            library = tokenizers_library(f"The tokenizer {self.name}")
            with refusing(self.name):
                loaded = library.Tokenizer.from_str(self._text)
                parts = [
                    part.__getstate__() for part in (loaded.normalizer, loaded.decoder) if part is not None
                ]
            require_bounded(map(json.loads, parts), self.name)
            with refusing(self.name):
                loaded.no_truncation()
                loaded.no_padding()
                loaded.encode_special_tokens = not marked
            self._libraries[marked] = loaded
        return self._libraries[marked]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_libraries": {}}

    def _encodings(self, texts: Sequence[str], *, marked: bool = False, fast: bool = False) -> list[Any]:
        """The library's encodings of texts, in `RAYON_NUM_THREADS` threads without the GIL. `fast`: without offsets."""
        library = self._loaded(marked=marked)
        with refusing(self.name):
            encode = library.encode_batch_fast if fast else library.encode_batch
            work = functools.partial(encode, list(texts), add_special_tokens=False)
            return list(in_time(work, sum(map(len, texts)), self.name))

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        return [np.array(encoding.ids, np.int32) for encoding in self._encodings(texts, fast=True)]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Numbers, list[tuple[int, int]]]]:
        encodings = self._encodings(texts, marked=True)
        return [(np.array(encoding.ids, np.int32), list(encoding.offsets)) for encoding in encodings]

    def special_words(self) -> list[str]:
        with refusing(self.name):
            added = self._loaded().get_added_tokens_decoder().values()
            return sorted({*super().special_words(), *(str(one.content) for one in added if one.special)})

    def decode(self, numbers: Sequence[int]) -> str:
        with refusing(self.name):
            text: str = self._loaded().decode([int(number) for number in numbers], skip_special_tokens=True)
        return text

    def opening(self) -> tuple[int, ...]:
        return self._template(1).before

    def frame(self, texts: int = 1) -> Frame:
        """The frame of the tokenizer's own template, if that has a token after a text."""
        encoding = self._template(texts)
        return encoding if encoding.behind else super().frame(texts)

    def _template(self, texts: int) -> Frame:
        """The special tokens that the library puts around texts, read once."""
        if texts not in self._frames:
            self._frames[texts] = self._probed(texts)
        return self._frames[texts]

    def _probed(self, texts: int) -> Frame:
        with refusing(self.name):
            probe = self._loaded().encode(*["a"] * texts, add_special_tokens=True)
        ids, places = tuple(probe.ids), [n for n, text in enumerate(probe.sequence_ids) if text is not None]
        if {*probe.sequence_ids} - {None} != {*range(texts)}:
            return Frame((), (), ())  # it has no token for the letter
        first, last = places[0], places[-1] + 1
        return Frame(ids[:first], tuple(ids[n] for n in range(first, last) if n not in places), ids[last:])

    def words(self) -> list[str]:
        words = [""] * self.size
        for word, number in self._loaded().get_vocab(with_added_tokens=True).items():
            words[number] = word
        return words

    def save(self, folder: Path, rows: int = 0) -> None:
        words = self.words()
        roles: dict[str, Any] = {KEYS[role]: getattr(self, role) for role in KEYS}
        named = {key: words[number] for key, number in roles.items() if number is not None}
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        _write(folder, self._text, {**self._settings, **named, **template}, range(self.size, rows))


def _goes_on(word: str) -> bool:
    return bool(word) and (word[0].isalnum() or word[0] == "_") and word[0] != "Ġ"


def _write(folder: Path, text: str, settings: Mapping[str, Any], unused: range) -> None:
    saved = {
        "clean_up_tokenization_spaces": False, "model_max_length": 1 << 30, **settings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    for key in UNSAVED:
        saved.pop(key, None)
    if unused:
        saved["added_tokens_decoder"] = {
            str(number): {"content": f"<unused_{number}>", "special": True} for number in unused
        }
    write_text(folder / "tokenizer.json", text)
    write_text(folder / "tokenizer_config.json", json.dumps(saved, indent=2) + "\n")


@functools.cache
def letters_of_bytes() -> dict[int, str]:
    """The character that represents each byte in a byte-level BPE: itself if printable, else one from 256 on
    (Radford et al., 2019, the code of GPT-2)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def tokenizers_library(what: str) -> Any:
    """The package `tokenizers`. Raises EnvironmentProblem without it."""
    return package("tokenizers", f"{what} needs the package tokenizers", "hf")


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn exceptions of the library, which is written in Rust and may panic, into DataError."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if RETRIES in str(error):
            raise slow(name, "has backtracked more than the 10,000,000 steps that a match may take") from None
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            why = " ".join(printable(str(error)).split())[:300].rstrip(".")
            raise DataError(
                f"The tokenizer {quoted(name)} cannot be used: {why or type(error).__name__}. Check that it is "
                "the right file."
            ) from None
        raise
