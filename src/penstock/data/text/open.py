"""Opening a tokenizer by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted, read_text, shown
from penstock.boundary.hub import hub_folder
from penstock.boundary.packages import package
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.run import DataConfig
from penstock.data.text import marian
from penstock.data.text.tokenizers import KEYS, Bytes, LibraryTokenizer, Tokenizer, refusing
from penstock.errors import ConfigError, DataError

MOST_BYTES = 64 << 20
"""Most bytes of a `tokenizer.json`; the largest in use have 33 MB."""
_SETTINGS = Bounds(bytes=1 << 24, values=1 << 18, control=True, wide=True)
"""`wide`, because transformers writes 10³⁰ as the most tokens of a text if there is no limit."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
ADDED_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FOLDER = "tokenizer"
"""Where a pack keeps its tokenizer."""
_MADE_OF = (
    "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", marian.SOURCE,
    marian.TARGET,
)  # fmt: skip
"""Files from which transformers makes a tokenizer if there is no `tokenizer.json`."""


def open_tokenizer(data: DataConfig, init_from: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names. `auto` is the tokenizer of the weights to start from, or of the pack;
    where neither has one, `bytes`. Raises ConfigError, DataError and EnvironmentProblem for one that is not there,
    broken, or needs a package."""
    name = data.tokenizer
    if name != "auto":
        return Bytes() if name == "bytes" else named(name)
    if init_from is not None:
        start = Path(init_from)
        if not start.exists():
            return named(init_from)
        folder = start.parent if start.is_file() else start
        if has_tokenizer(folder):
            return in_folder(folder)
    for source, _ in data.parts():
        kind, _, path = source.partition(":")
        if kind == "pack" and has_tokenizer(Path(path) / TOKENIZER_FOLDER):
            return in_folder(Path(path) / TOKENIZER_FOLDER)
    return Bytes()


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer in any form."""
    return any((folder / file).is_file() for file in (_FILES[0], *_MADE_OF))


def found_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder, None if it has none."""
    return in_folder(folder) if has_tokenizer(folder) else None


def named(name: str) -> Tokenizer:
    """Open a tokenizer: a folder, a `tokenizer.json`, a sentencepiece `.model`, or a name on the hub."""
    path = Path(name)
    if path.is_dir():
        return in_folder(path)
    if path.is_file():
        if path.suffix in (".model", ".spm"):
            from penstock.data.text.sentencepiece import read_model

            return read_model(path)
        return _from_file(path, {})
    return in_folder(_fetch(name))


def in_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, as transformers or `Tokenizer.save` wrote it."""
    if not has_tokenizer(folder):
        raise ConfigError(
            f"The folder {shown(folder)} holds no tokenizer: none of {_FILES[0]}, {', '.join(_MADE_OF)} is there. Set "
            "data.tokenizer to a folder with one, or to `bytes`."
        )
    settings = settings_in(folder)
    if marian.is_marian(folder):  # a tokenizer.json in it would be for sources only
        return marian.read_marian(folder, settings)
    if (folder / _FILES[0]).is_file():
        tokenizer = _from_file(folder / _FILES[0], settings)
        if settings.get("penstock") == Bytes.fingerprint:
            template, tokenizer = tokenizer.chat_template, Bytes()
            tokenizer.chat_template = template
        return tokenizer
    # XLM-RoBERTa and CamemBERT number pieces differently from their sentencepiece.bpe.model; transformers knows how.
    models = [folder / file for file in ("spiece.model", "tokenizer.model") if (folder / file).is_file()]
    if models:
        from penstock.data.text.sentencepiece import read_model

        tokenizer = read_model(models[0], settings)
        if _named_tokens(folder, settings) <= set(tokenizer.words()):
            return tokenizer
    return _by_transformers(folder, settings)


def _named_tokens(folder: Path, settings: dict[str, Any]) -> set[str]:
    """The special and added tokens that the files beside a tokenizer name."""
    named: list[Any] = [settings.get(key) for key in KEYS.values()]
    for key in ("additional_special_tokens", "added_tokens_decoder"):
        several = settings.get(key)
        named += (
            several.values() if isinstance(several, dict) else several if isinstance(several, list) else ()
        )
    if (folder / ADDED_FILE).is_file():
        raw = read_text(folder / ADDED_FILE, "The added tokens", limit=_SETTINGS.bytes)
        named += parse_json(raw, f"The file {shown(folder / ADDED_FILE)}", error=DataError, bounds=_SETTINGS)
    words = (token.get("content") if isinstance(token, dict) else token for token in named)
    return {word for word in words if isinstance(word, str)}


def settings_in(folder: Path) -> dict[str, Any]:
    """The settings in the files beside a tokenizer; tokenizer_config.json takes precedence. `chat_template` is a text:
    among several templates the one called default, or tool_use where there are tools."""
    settings: dict[str, Any] = {}
    for file in _FILES[:0:-1]:
        if (folder / file).is_file():
            raw = read_text(folder / file, "The tokenizer's settings", limit=_SETTINGS.bytes)
            settings |= parse_json(raw, f"The file {shown(folder / file)}", error=DataError, bounds=_SETTINGS)
    named = settings.get("chat_template")
    if isinstance(named, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
    templates = named if isinstance(named, dict) else {"default": named}
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE)):
        if (folder / file).is_file():
            templates[name] = read_text(folder / file, "The chat template", limit=1 << 20)
    default, with_tools = (templates.get(name) for name in ("default", "tool_use"))
    settings["chat_template"] = default
    if isinstance(default, str) and isinstance(with_tools, str):
        # The choice that transformers makes. The signs + keep the white space at both ends of each.
        settings["chat_template"] = (
            "{% if tools is defined and tools is not none +%}" + with_tools.removesuffix("\n")
            + "{%+ else +%}" + default.removesuffix("\n") + "{%+ endif %}"
        )  # fmt: skip
    return settings


def _from_file(path: Path, settings: dict[str, Any]) -> Tokenizer:
    text = read_text(path, "The tokenizer", limit=MOST_BYTES)
    return LibraryTokenizer(text, shown(path), settings)


def _by_transformers(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """Open older formats, such as BERT's `vocab.txt`, which transformers converts to a `tokenizer.json`."""
    need = f"The tokenizer in {shown(folder)} has no tokenizer.json, so transformers must read it"
    transformers = package("transformers", need, "hf")
    with refusing(shown(folder)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else ""
    if not text:
        raise DataError(
            f"The tokenizer in {shown(folder)} ({type(tokenizer).__name__}) is written in Python only. Convert it: "
            "transformers' `save_pretrained` writes a tokenizer.json where it can."
        )
    return LibraryTokenizer(
        text, shown(folder), settings | {key: str(word) for key, word in tokenizer.special_tokens_map.items()}
    )


def _fetch(name: str) -> Path:
    """The files of a tokenizer on the Hugging Face hub, from its cache where they are there."""
    more = (
        ADDED_FILE,
        TEMPLATE_FILE,
        TOOL_TEMPLATE_FILE,
        marian.SECOND_TABLE,
        "*.model",
        "merges.txt",
        "config.json",
    )
    folder = hub_folder(name, (*_FILES, *_MADE_OF, *more), enough=_is_complete)
    if folder is None:
        raise ConfigError(
            f"{quoted(name)} on the Hugging Face hub holds no tokenizer, or a part of Marian's without the rest. Check "
            "data.tokenizer."
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether a folder holds a tokenizer with all its files, as far as can be seen."""
    return has_tokenizer(folder) and not (marian.is_marian(folder) and marian.lacking(folder))
