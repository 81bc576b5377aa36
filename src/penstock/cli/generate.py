"""`penstock generate`: continue or translate texts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import read_text
from penstock.cli._app import configured
from penstock.cli._options import Flag, JsonLines, Texts
from penstock.config.decoding import Decoding, GenerateConfig
from penstock.config.load import from_dict, load, read_file
from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    from penstock.infer.generator import Generator, Prompt

MOST = 64 << 20
"""Maximum bytes of the prompts that are read."""


def _over_the_folders(
    cls: type[GenerateConfig], *, file: Path | None, overrides: Mapping[str, Any]
) -> GenerateConfig:
    """The settings on top of the defaults in the model's folder."""
    from penstock.infer.usual import chosen, report_dropped, usual_of

    stored = {} if file is None else read_file(file)
    config = load(cls, file=file, overrides=overrides, stored=stored)
    named = {key.partition(".")[2] for key in (*stored, *overrides) if key.startswith("decoding.")}
    typed = {name: getattr(config.decoding, name) for name in sorted({*named, *stored.get("decoding", ())})}
    fields, dropped = chosen(usual_of(config.model).fields if config.model else {}, typed)
    report_dropped(dropped, set())
    return replace(config, decoding=from_dict(Decoding, fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of conversations."""

    chat: Flag = False
    """Use the model's chat template; without prompts, converse here."""
    system: str | None = None
    """System message at the beginning of a chat."""

    def begin(self) -> list[dict[str, str]]:
        """The messages that begin each conversation. Raises ConfigError for a system message without a chat."""
        if self.system is not None and not self.chat:
            raise ConfigError("--system begins a chat; add --chat, or write it into the prompt.")
        return [] if self.system is None else [{"role": "system", "content": self.system}]


_NO_CHAT = ChatOptions()


@configured(GenerateConfig, positional="model", aliases={"decoding.": ""}, loader=_over_the_folders)
def generate(
    config: GenerateConfig,
    *prompts: Texts,
    file: Annotated[Path | None, Parameter(help="Read prompts from this file, one per line.")] = None,
    as_json: JsonLines = False,
    image: Annotated[
        tuple[Path, ...],
        Parameter(help="Write a caption of this image, in the language of --label.", negative=""),
    ] = (),
    talk: Annotated[ChatOptions, Parameter(name="*")] = _NO_CHAT,
) -> None:
    """Continue or translate texts with a trained model.

    MODEL is a run's folder or its export, a folder that transformers wrote, or a name on the Hugging Face hub. PROMPTS
    come from the command line, from --file, or from a pipe, one per line. The answer to a single prompt is printed as
    it is generated.

    With --chat each prompt begins a conversation of its own. Without prompts, the lines that you type into the terminal
    are one conversation, until Ctrl-D. With --image, a model of texts and images writes a caption. With --plan, each of
    several processes does its part, and one prints.

        penstock generate runs/numbers "en>de: forty-two"
        penstock generate runs/chat --chat
    """
    from penstock.infer.captions import writes_of_either
    from penstock.infer.ranks import from_rank_zero, require_ranks
    from penstock.parallel import launched

    model, start = config.named("generate"), talk.begin()
    if image or writes_of_either(model):
        if talk.chat or as_json:
            raise ConfigError(
                "A model of images and texts writes captions and translations as lines; leave --chat and --json out."
            )
        _caption(config, image, () if image else tuple(input_texts(prompts, file)))
        return
    plan = config.as_plan
    require_ranks(plan, launched(), weights=config.weights, shortlist=config.shortlist is not None)
    # One rank reads the prompts, because several cannot read one pipe, and prints what all ranks have generated.
    main = launched() == 1 or os.environ["RANK"] == "0"
    converse = talk.chat and not prompts and file is None and sys.stdin is not None and sys.stdin.isatty()
    texts = input_texts(prompts, file) if main and not converse else []
    with _open(config, model, main) as generator:
        if from_rank_zero(converse, generator.dims):
            _converse(generator, start, config, main)
        else:
            texts = from_rank_zero(texts, generator.dims)
            questions: list[Prompt] = [*texts]
            if talk.chat:
                questions = [generator.conversation([*start, _user(text)]) for text in texts]
            _answer(generator, texts, questions, config, main, as_json)


def _open(config: GenerateConfig, model: str, main: bool) -> Generator:
    from penstock.infer.generator import Generator

    generator = Generator(
        model, config.as_plan, weights=config.weights, draft=config.draft, device=config.device,
        shortlist=() if config.shortlist is None else config.shortlist,
        only=() if config.label is None else (config.label,),
    )  # fmt: skip
    if main and generator.bytes < generator.whole_bytes:
        sizes = f"{generator.bytes / 1e6:,.1f} MB of weights, of {generator.whole_bytes / 1e6:,.1f} MB"
        print(f"Only the experts of label {config.label} are loaded: {sizes}.", file=sys.stderr)
    return generator


def _answer(
    generator: Generator, texts: list[str], prompts: Sequence[Prompt], config: GenerateConfig, main: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the answer to each prompt; `texts` are the prompts as they were typed."""
    decoding, label = config.decoding, config.label
    if len(texts) == 1 and not as_json and _comes_in_pieces(decoding):
        _print_pieces(generator.stream(prompts[0], decoding, label=label), main)
        return
    step = config.batch * config.as_plan.dp
    for begin in range(0, len(texts), step):
        batch = prompts[begin : begin + step]
        for number, generated in enumerate(generator.generate(batch, decoding, label=label)):
            if main and as_json:
                print(json.dumps({
                    "prompt": texts[begin + number // decoding.best], "text": generated.text, "ids": generated.ids,
                    "finished": generated.finished, "score": generated.score,
                }))  # fmt: skip
            elif main:
                print(generated.text)


def _converse(generator: Generator, start: list[dict[str, str]], config: GenerateConfig, main: bool) -> None:
    """Answer line by line until the input ends. Each answer depends on all earlier messages."""
    from penstock.infer.ranks import from_rank_zero

    if not _comes_in_pieces(config.decoding):
        raise ConfigError(
            "A chat in a terminal shows text while it is generated; set beams and best to 1, and speculate to 0."
        )
    messages = list(start)
    while (line := from_rank_zero(_typed() if main else None, generator.dims)) is not None:
        messages.append(_user(line))
        pieces = generator.stream(generator.conversation(messages), config.decoding, label=config.label)
        messages.append({"role": "assistant", "content": _print_pieces(pieces, main)})


def _typed() -> str | None:
    """The next line that is typed and not blank; None at the end."""
    line = ""
    while not line.strip():
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return None
    return line.rstrip("\n")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _print_pieces(pieces: Iterable[str], main: bool) -> str:
    """Print a text while it is generated, on the rank that prints; returns the whole."""
    parts = []
    for piece in pieces:
        parts.append(piece)
        if main:
            print(piece, end="", flush=True)
    if main:
        print()
    return "".join(parts)


def _caption(config: GenerateConfig, images: tuple[Path, ...], texts: tuple[str, ...]) -> None:
    """Print captions of images, or translations, a line for each."""
    from penstock.infer.captions import Captioner

    if config.label is None:
        raise ConfigError("Say in which language to write, as training named it: --label de.")
    for name in ("weights", "draft", "shortlist"):
        if getattr(config, name) != getattr(GenerateConfig(), name):
            raise ConfigError(
                f"A model of images and texts writes with all its weights as they are; leave --{name} out."
            )
    captioner = Captioner(config.named("generate"), config.as_plan, batch=config.batch, device=config.device)
    how = config.label, config.decoding
    for line in captioner.caption(images, *how) if images else captioner.translate(texts, *how):
        print(line)


def _comes_in_pieces(decoding: Decoding) -> bool:
    return decoding.best == decoding.beams == 1 and not decoding.speculate


def _piped() -> str:
    """The text on standard input, in UTF-8 in any locale. Raises DataError for other bytes, and for too many."""
    pipe = getattr(sys.stdin, "buffer", None)  # a caller's own stream may have none
    raw: bytes = sys.stdin.read(MOST + 1).encode() if pipe is None else pipe.read(MOST + 1)
    if len(raw) > MOST:
        raise DataError(f"The input has more than {MOST:,} bytes, which is the most that is read; split it.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"The input is not text in UTF-8: byte {problem.start:,} is 0x{raw[problem.start]:02x}. Convert it first."
        ) from None


def input_texts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    """The texts of a command line, of a file, or of a pipe. Raises ConfigError where there are none."""
    if prompts and file is not None:
        raise ConfigError("Give texts on the command line, or a --file, not both.")
    if prompts:
        return list(prompts)
    if file is not None:
        content = read_text(file, "The file of texts", limit=MOST)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "There is no text: give one after the model, or a --file with one per line, or pipe them in."
        )
    else:
        content = _piped()
    # Not `splitlines`, for which a form feed or U+2028 inside a text ends a line too.
    lines = [line for line in re.split(r"\r\n|\r|\n", content) if line.strip()]
    if not lines:
        raise ConfigError("The input has no text; write one per line.")
    return lines
