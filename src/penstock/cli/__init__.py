"""The command line: one file per verb, imported only when the verb is run, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError

from penstock import __version__
from penstock.errors import ExitCode, PenstockError
from penstock.launch.report import write_report

app = App(
    name="penstock",
    help="Predict, apply and measure every optimisation that makes Transformers train fast.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` returns its code
)


def _command(of: App, verb: str, words: str, *, function: str = "", **options: Any) -> None:
    of.command(f"penstock.cli.{function or f'{verb}:{verb}'}", name=verb, help=words, **options)


def _configured(verb: str, words: str) -> None:
    """A verb with an option for each setting. Its usage is given, because making it out of them takes a while."""
    _command(app, verb, words, usage=f"Usage: penstock {verb} [MODEL] [OPTIONS]")


_configured("train", "Train a model; resumes where it was stopped.")
_command(app, "launch", "Start the ranks of a run, and restart them after a fault.")
_command(app, "run", "Run a training script in mixed precision, unchanged.")
_configured("ladder", "Measure what each optimisation gains here.")
_configured("plan", "Find the fastest parallel layout of a model on a cluster.")
_command(app, "pack", "Pack an image folder or tar shards for fast reading.")
_configured("scale", "Measure a model's gradients and choose a loss scale for fp16.")
_command(app, "probe", "Measure this machine, and store the result.")
_command(app, "doctor", "Say what works here, and how to fix what does not.")
checkpoint = App(name="checkpoint", help="Verify, list, export and convert the checkpoints of a run.")
_command(checkpoint, "verify", "Check every byte of a checkpoint.", function="checkpoint:verify")
_command(checkpoint, "list", "List the checkpoints of a run.", function="checkpoint:list_")
_command(checkpoint, "export", "Write weights as a Hugging Face folder.", function="checkpoint:export")
_command(
    checkpoint, "convert", "Rewrite a checkpoint for another number of ranks.", function="checkpoint:convert"
)
app.command(checkpoint)


_WITH_VALUE = ("--precision", "--dtype", "--option")
"""Options of `run` that take a value. What follows the script's name is the script's."""
_SPINS = "3000"
"""Rounds for which a thread of GNU OpenMP waits awake at a barrier. docs/decisions/0010 says why they are few."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (of this process, unless `arguments` are given) and return its exit code.

    A `PenstockError` becomes a message on stderr and an exit code. Any other error is a bug, ours or a library's, and
    shows its traceback.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(
            "GOMP_SPINCOUNT", _SPINS
        )  # read when torch is loaded, which no verb has done yet
    try:
        result = app(
            before_script(sys.argv[1:] if arguments is None else arguments),
            exit_on_error=False,
            print_error=True,
            result_action="return_value",
        )
    except CycloptsError:
        return int(ExitCode.CONFIG)  # cyclopts has printed what is wrong
    except PenstockError as error:
        if not write_report(error):  # under `penstock launch`, the agent shows it, and only once
            print(f"penstock: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left. Redirect stdout, so that Python's own flush at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return result if isinstance(result, int) and not isinstance(result, bool) else int(ExitCode.DONE)


def before_script(tokens: Sequence[str]) -> list[str]:
    """The command line with `--` before the script of `run`, so that all that follows goes to the script."""
    if not tokens or tokens[0] != "run":
        return list(tokens)
    place = 1
    while place < len(tokens) and tokens[place].startswith("-") and tokens[place] != "--":
        place += 2 if tokens[place] in _WITH_VALUE else 1
    if place >= len(tokens) or tokens[place] == "--":
        return list(tokens)
    return [*tokens[:place], "--", *tokens[place:]]
