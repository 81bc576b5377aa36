"""Files of `penstock plan`: the best Plan as TOML, and any text at a path that the user gave."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.config.load import dump_toml
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, ViTConfig, title
from penstock.config.rules import problems
from penstock.errors import EnvironmentProblem
from penstock.planner.prediction import Prediction


def plan_file(config: ModelConfig, best: Prediction) -> str:
    """The best Plan of a model as TOML.

    A vision model's file is for `penstock train --config`. `train` has no other models, so their file holds
    only the Plan, for `Plan.from_toml`, with comments on what it was found for.
    """
    table = "[plan]\n" + dump_toml(best.plan)
    if isinstance(config, ViTConfig):
        name = config.short_form()
        model = f"[model]\n{dump_toml(config)}" if name == "custom" else f'model = "{name}"\n'
        return f"{model}\n{table}"
    return "".join(f"# {line}\n" for line in _told(config, best)) + "\n" + table


def _told(config: DecoderConfig | EncoderConfig | Seq2SeqConfig, best: Prediction) -> list[str]:
    tokens = f"{config.sequence} tokens"
    if isinstance(config, Seq2SeqConfig):
        tokens += f" ({config.decoder_sequence} in the decoder)"
    lines = [
        f"The fastest layout of {title(config)} with samples of {tokens} on {best.gpus} {best.machine},",
        f"{best.global_batch} samples a step. `penstock train` trains no language models: Plan.from_toml reads this.",
    ]
    if not problems(best.plan, run=True):
        lines.append("penstock.build.build applies it to a model of your own.")
    else:
        lines.append("penstock.build.build runs it on no model yet: penstock.config.rules.problems says why.")
    return lines


def check_writable(*paths: Path | None) -> None:
    """Raise what `write` would raise for any of `paths`, before long work starts. Their contents stay
    unchanged."""
    for path in paths:
        if path is not None:
            with _refusing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                new = not path.exists()
                path.open("ab").close()
                if new:
                    path.unlink()


def write(path: Path, text: str) -> None:
    """Write `text`, and create the folders for it. Raises EnvironmentProblem if that fails."""
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why, remedy = error.strerror, "choose another path"
        if path.is_dir():
            remedy = "give the name of a file in it"
        elif path.parent.exists() and not path.parent.is_dir():
            why = f"{path.parent} is not a folder"
        raise EnvironmentProblem(f"{path} cannot be written: {why}; {remedy}.") from error
