"""`penstock generate`: continue or translate texts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import read_text
from penstock.cli._app import configured
from penstock.config.decoding import Decoding, GenerateConfig
from penstock.config.load import from_dict, load, read_file
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.infer.generator import Generated, Generator, Prompt

MOST = 64 << 20
"""Bytes of prompts that are read."""


def _over_the_folders(
    cls: type[GenerateConfig], *, file: Path | None, overrides: Mapping[str, Any]
) -> GenerateConfig:
    """The settings, over what the model's folder asks for."""
    from penstock.infer.usual import chosen, report_dropped, usual_of

    stored = {} if file is None else read_file(file)
    config = load(cls, file=file, overrides=overrides, stored=stored)
    named = {key.partition(".")[2] for key in (*stored, *overrides) if key.startswith("decoding.")}
    given = {name: getattr(config.decoding, name) for name in sorted({*named, *stored.get("decoding", ())})}
    fields, dropped = chosen(usual_of(config.model).fields if config.model else {}, given)
    report_dropped(dropped, set())
    return replace(config, decoding=from_dict(Decoding, fields))


@configured(GenerateConfig, positional="model", aliases={"decoding.": ""}, loader=_over_the_folders)
def generate(
    config: GenerateConfig,
    *prompts: Annotated[str, Parameter(allow_leading_hyphen=False, help="Or use --file, or a pipe.")],
    file: Annotated[Path | None, Parameter(help="Read prompts from this file, one per line.")] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print one JSON object per line.")
    ] = False,
    image: Annotated[
        tuple[Path, ...],
        Parameter(help="Write a caption of this image, in the language of --label.", negative=""),
    ] = (),
    chat: Annotated[
        bool, Parameter(negative="", help="Use the model's chat template; without prompts, converse here.")
    ] = False,
    system: Annotated[str | None, Parameter(help="System message at the beginning of a chat.")] = None,
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
    from penstock.infer.generator import Generator
    from penstock.infer.ranks import from_rank_zero, require_ranks
    from penstock.parallel import launched

    model, plan, decoding = config.named("generate"), config.as_plan, config.decoding
    if system is not None and not chat:
        raise ConfigError("--system begins a chat; add --chat, or write it into the prompt.")
    if image or writes_of_either(model):
        if chat or as_json:
            raise ConfigError(
                "A model of images and texts writes captions and translations as lines; leave --chat and --json out."
            )
        _caption(config, image, () if image else tuple(words(prompts, file)))
        return
    require_ranks(plan, launched(), weights=config.weights, shortlist=config.shortlist is not None)
    # One rank reads, for several cannot read one pipe, and shows what all have made.
    main = launched() == 1 or os.environ["RANK"] == "0"
    typed = chat and not prompts and file is None and sys.stdin is not None and sys.stdin.isatty()
    texts = words(prompts, file) if main and not typed else []
    with Generator(
        model,
        plan,
        weights=config.weights,
        draft=config.draft,
        shortlist=() if config.shortlist is None else config.shortlist,
        only=() if config.label is None else (config.label,),
        device=config.device,
    ) as made:
        if main and made.bytes < made.whole_bytes:
            sizes = f"{made.bytes / 1e6:,.1f} MB of weights, of {made.whole_bytes / 1e6:,.1f} MB"
            print(f"Only the experts of label {config.label} are loaded: {sizes}.", file=sys.stderr)
        before = [] if system is None else [{"role": "system", "content": system}]
        if from_rank_zero(typed, made.dims):
            _converse(made, before, decoding, config.label, main)
            return
        texts = from_rank_zero(texts, made.dims)
        conversations: list[Prompt] = [
            made.conversation([*before, _user(text)]) if chat else text for text in texts
        ]
        if len(texts) == 1 and not as_json and _comes_in_pieces(decoding):
            _tell(made.stream(conversations[0], decoding, label=config.label), main)
            return
        step = config.batch * plan.dp
        for begin in range(0, len(texts), step):
            some = slice(begin, begin + step)
            for number, one in enumerate(made.generate(conversations[some], decoding, label=config.label)):
                if main:
                    _show(texts[begin + number // decoding.best], one, as_json)


def _converse(
    made: Generator, before: list[dict[str, str]], decoding: Decoding, label: str | None, main: bool
) -> None:
    """Answer line by line, each with all that was said before it, until what is typed ends."""
    from penstock.infer.ranks import from_rank_zero

    if not _comes_in_pieces(decoding):
        raise ConfigError(
            "A chat in a terminal is greedy or drawn; set beams and best to 1, and speculate to 0."
        )
    messages = list(before)
    while (line := from_rank_zero(_typed() if main else None, made.dims)) is not None:
        messages.append(_user(line))
        answer = _tell(made.stream(made.conversation(messages), decoding, label=label), main)
        messages.append({"role": "assistant", "content": answer})


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


def _tell(pieces: Iterable[str], main: bool) -> str:
    """Print a text as it comes, on the rank that prints; returns the whole."""
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
    made = Captioner(config.named("generate"), config.as_plan, batch=config.batch, device=config.device)
    how = config.label, config.decoding
    for one in made.caption(images, *how) if images else made.translate(texts, *how):
        print(one)


def _comes_in_pieces(decoding: Decoding) -> bool:
    alone = decoding.best == decoding.beams == 1
    return alone and not decoding.speculate


def _show(prompt: str, generated: Generated, as_json: bool) -> None:
    if as_json:
        print(json.dumps({
            "prompt": prompt, "text": generated.text, "ids": generated.ids,
            "finished": generated.finished, "score": generated.score,
        }))  # fmt: skip
    else:
        print(generated.text)


def words(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    """The texts of a command line, of a file, or of what is piped in. Raises ConfigError where there are none."""
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
        content = sys.stdin.read(MOST)
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise ConfigError("The input has no text; write one per line.")
    return lines
