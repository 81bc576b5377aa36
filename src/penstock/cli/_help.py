"""The help page of a verb, and the advice for an option that a verb does not have."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cyclopts import App, UnknownOptionError

from penstock.boundary.files import shown
from penstock.config.removed import removed_option

ELSEWHERE = {
    "amp": "--plan.precision", "batch_size": "--plan.micro_batch", "bf16": "--plan.precision",
    "bs": "--plan.micro_batch", "checkpoint": "--init_from", "finetune": "--init_from", "fp16": "--plan.precision",
    "grad_accum": "--plan.accumulate", "gradient_accumulation_steps": "--plan.accumulate",
    "learning_rate": "--recipe.lr", "max_steps": "--recipe.steps", "mixed_precision": "--plan.precision",
    "mlflow": "--track mlflow", "n_gpus": "--gpus", "nproc": "penstock launch --procs",
    "nproc_per_node": "penstock launch --procs", "num_epochs": "--recipe.epochs", "num_gpus": "--gpus",
    "num_workers": "--data.workers", "output_dir": "--output", "pretrained": "--init_from",
    "tensorboard": "--track tensorboard", "wandb": "--track wandb",
}  # fmt: skip
"""Options of other training programs, with their names here."""
_ALIKE = 0.7
_SHOWN = 3


ALL = "--help-all"
_MORE = "\n\nThese are the most needed options; `{} --help-all` lists all of them."


@contextlib.contextmanager
def described_by_docstring(app: App, words: Sequence[str]) -> Iterator[list[str]]:
    """Let the help page of the verb in the command line `words` begin with its docstring. Yields the words that the
    parser knows, without `--help-all`: for a verb with many options `--help` lists the most needed ones. On exit the
    parser accepts all options again.

    Verbs are imported late, so each is registered with one line of description. Without this, that line would be the
    whole help page.
    """
    chain, commands, _ = app.parse_commands([word for word in words if word not in (*app.help_flags, ALL)])
    command = commands[-1]
    verb: Any = command.default_command
    pages = getattr(verb, "pages", None)
    if getattr(verb, "__module__", "").startswith("penstock."):  # and not a flag of the parser's own
        command.help = verb.__doc__ = unwrapped(inspect.getdoc(verb) or "")
        if pages:
            _take_options(verb, pages[ALL in words])
            command.help += "" if ALL in words else _MORE.format(" ".join((app.name[0], *chain)))
    try:
        yield ["--help" if word == ALL else word for word in words]
    finally:
        if pages:
            _take_options(verb, pages[True])


def _take_options(verb: Any, page: inspect.Signature) -> None:
    verb.__signature__ = page
    verb.__annotations__ = {option.name: option.annotation for option in page.parameters.values()}


def unwrapped(doc: str) -> str:
    """A docstring with each paragraph, and each description of an option, on one line, for terminals of any width.

    Indented lines before the options are examples, and stay as they are.
    """
    text, heading, options = doc.partition("\n\nParameters\n")
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    options = re.sub(r"(?m)^(\w+) ", r"\1\n    ", options.replace("\n    ", " "))
    return text + heading + options


def unknown_option_message(error: UnknownOptionError) -> str:
    """The message about an option that a verb does not have: its name, and names that are like it."""
    word = (error.token.keyword or error.token.value).partition("=")[0]
    command, option = " ".join(error.command_chain or ()), word.lstrip("-").replace("-", "_").lower()
    if refusal := removed_option(command, option):
        return refusal
    names = {name for argument in error.argument_collection for name in argument.names if name[:2] == "--"}
    verb = f"penstock {command}".rstrip()
    near = list(dict.fromkeys(_near(option, names)))[:_SHOWN]
    remedy = f" Did you mean {' or '.join(near)}?" if near else f" `{verb} {ALL}` lists those there are."
    return f"There is no option {shown(word)}.{remedy}"


def _near(word: str, names: Collection[str]) -> Iterator[str]:
    """The options that `word` may mean: by its name in other programs, by the last part of a dotted name, or by similar
    spelling."""
    elsewhere = ELSEWHERE.get(word, "")
    if elsewhere and elsewhere.partition(" ")[0] in (*names, "penstock"):
        yield elsewhere
        return
    plain = {
        name: name[2:].replace("-", "_").lower()
        for name in sorted(names, key=lambda name: (name.count("."), name))
    }
    last = word.rpartition(".")[2]
    same = [name for name, full in plain.items() if full == word or full.rpartition(".")[2] in (word, last)]
    if same:
        yield from same
        return
    for dotted in (False, True):
        whole = ((full, name) for name, full in reversed(plain.items()))
        options = {full if dotted else full.rpartition(".")[2]: name for full, name in whole}
        for close in difflib.get_close_matches(word if dotted else last, options, n=1, cutoff=_ALIKE):
            yield options[close]
            return
