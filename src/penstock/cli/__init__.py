"""The command line: one file per verb, imported only when the verb is run, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, CycloptsPanel, UnknownOptionError

from penstock import __version__
from penstock.boundary.files import explained, printable, quoted
from penstock.boundary.trees import control_character
from penstock.config.removed import removed
from penstock.errors import ConfigError, ExitCode, PenstockError
from penstock.launch.report import write_report

app = App(
    name="penstock",
    help="Predict, apply and measure every optimisation that makes Transformers train and serve fast.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` returns its code
)
# Each line is also the first of the verb's docstring, which `penstock VERB --help` shows.
_VERBS = {
    "train": "Train a model; resumes where it was stopped.",
    "launch": "Start the ranks of a run, and restart them after a fault.",
    "run": "Run a training script in mixed precision, or under a Plan, unchanged.",
    "tune": "Find the fastest Plan for a training script, unchanged.",
    "evaluate": "Measure a trained model: every metric of its task.",
    "report": "Write the page of a run, or of several beside each other.",
    "generate": "Continue or translate texts with a trained model.",
    "sample": "Make images with a trained diffusion model.",
    "embed": "Turn texts into vectors with a trained encoder.",
    "retrieve": "Find texts or images by their likeness to a text or an image.",
    "classify": "Classify texts or images with a trained model.",
    "ladder": "Measure what each optimisation gains on this machine.",
    "experts": "Show how often a run visited its experts, and place them on devices.",
    "plan": "Find the fastest parallel layout of a model on a cluster.",
    "deploy": "Find the fewest devices that serve a model in time.",
    "compress": "Make a trained model smaller: prune, distil and quantise it.",
    "export": "Write a model for other programs: ONNX, CTranslate2, torch, transformers.",
    "serve": "Serve a model over HTTP, with OpenAI's routes.",
    "pack": "Pack images or texts for fast reading.",
    "scale": "Measure a model's gradients and choose a loss scale for fp16.",
    "probe": "Measure this machine, and store the result.",
    "tune-kernels": "Measure which fused operators pay on this machine.",
    "doctor": "Check what works on this machine, and how to fix what does not.",
    "completion": "Print a script with which bash, zsh or fish completes verbs and options.",
}
_CHECKPOINT_VERBS = {
    "verify": "Check every byte of a checkpoint.",
    "list": "List the checkpoints of a run.",
    "export": "Write weights as a Hugging Face folder.",
    "average": "Write the mean of a run's newest checkpoints.",
}
_WITH_SETTINGS = (
    "train evaluate ladder plan deploy serve scale generate sample embed retrieve classify compress"
)
"""Verbs with an option for each setting. Their usage is given here, because deriving it from the options is slow."""
_USAGE = {
    **dict.fromkeys(_WITH_SETTINGS.split(), "[MODEL] [OPTIONS]"),
    **dict.fromkeys(("run", "tune"), "[OPTIONS] SCRIPT [ARGUMENTS]"),
    "launch": "[OPTIONS] -- PROGRAM",
}
for _verb, _words in _VERBS.items():
    _usage = f"Usage: penstock {_verb} {_USAGE[_verb]}" if _verb in _USAGE else None
    _module = _verb.replace("-", "_")
    app.command(f"penstock.cli.{_module}:{_module}", name=_verb, help=_words, usage=_usage)
checkpoint = App(name="checkpoint", help="Verify, list, export and average the checkpoints of a run.")
for _verb, _words in _CHECKPOINT_VERBS.items():
    checkpoint.command(f"penstock.cli.checkpoint:{_verb}_", name=_verb, help=_words)
app.command(checkpoint)
app.register_install_completion_command(help="Have the shell complete verbs and options (bash, zsh, fish).")


GREETING = f"""\
Penstock {__version__} makes Transformers train and serve as fast as hardware allows.
Four things to type:

  penstock train vit-digits
                           trains a small model on real images in a minute
                           (nothing is downloaded)
  penstock tune train.py   finds the fastest settings for a training script,
                           without a change to it
  penstock ladder vit-s16  measures which optimisations pay on this machine;
                           --model my_module:factory measures your own model
  penstock plan gpt-175b --machine a100-80g --gpus 1024
                           finds the fastest layout of a cluster

penstock --help lists everything else."""
_WITH_VALUE = {
    "run": ("--precision", "--dtype", "--option", "--plan", "--watch"),
    "tune": ("--budget", "--rounds", "--round-seconds", "--rungs", "--skip", "--procs", "--output",
             "--timeout"),
}  # fmt: skip
"""Options that take a value, of the verbs that run a script. What follows the script's name is the script's."""
_LONGEST = 2000
"""Maximum characters of a message that repeats what was typed."""
_MOST_WORDS = 1000
"""Maximum number of arguments: the time to parse them grows with its square."""
_SPINS = "3000"
"""Rounds that a thread of GNU OpenMP spins at a barrier before it sleeps; docs/decisions/0010 has the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (of this process, unless `arguments` are given) and return its exit code.

    A `PenstockError` becomes a message on stderr and an exit code, and so does an error of the system about a file or a
    disk. Any other error is a bug, ours or a library's, and shows its traceback.
    """
    if arguments is None:
        return _main(sys.argv[1:])
    # The caller goes on afterwards, without what a script has changed in this process.
    main_module, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    try:
        return _main(arguments)
    finally:
        sys.modules["__main__"] = main_module
        sys.argv[:], sys.path[:] = argv, path


def _main(typed: Sequence[str]) -> int:
    if not typed:
        print(GREETING)
        return int(ExitCode.DONE)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is loaded, by a verb
    try:
        words = before_script(typed)
        check_words(words)
        if instead := removed("commands").get(words[0]):
            raise ConfigError(f"penstock {words[0]} was removed; {instead}.")
        with contextlib.ExitStack() as help_page:
            if not {*app.help_flags, "--help-all"}.isdisjoint(_own_words(words)):
                from penstock.cli._help import described_by_docstring

                words = help_page.enter_context(described_by_docstring(app, words))
            result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()  # a full disk is reported here, or by a traceback at the end of Python
    except CycloptsError as error:
        _show(error)
        return int(ExitCode.CONFIG)
    except PenstockError as error:
        return _end(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader (`| head`) has left
        return 141
    except OSError as error:
        problem = explained(error)
        if problem is None:
            raise
        if error.filename is None:
            _drop_output()
        return _end(problem)
    return result if isinstance(result, int) and not isinstance(result, bool) else int(ExitCode.DONE)


def _show(error: CycloptsError) -> None:
    """Print what is wrong with the command line; for an unknown option, also the option that was probably meant."""
    words = str(error)
    if isinstance(error, UnknownOptionError):
        from penstock.cli._help import unknown_option_message

        print(f"penstock: {unknown_option_message(error)}", file=sys.stderr)
    elif len(words) <= _LONGEST and words.replace("\n", "").isprintable():
        app.error_console.print(CycloptsPanel(error))
    else:
        print(f"penstock: {printable(words[:_LONGEST])}{'…' * (len(words) > _LONGEST)}", file=sys.stderr)


def _end(error: PenstockError) -> int:
    """Print the error that ends the command, and return its code."""
    if not write_report(error):  # under `penstock launch`, the agent shows it, and only once
        print(f"penstock: {printable(str(error))}", file=sys.stderr)
    return int(error.exit_code)


def _drop_output() -> None:
    """Redirect a closed stdout, so that Python's own flush at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):  # a caller's own stream may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_words(words: Sequence[str]) -> list[str]:
    """The words before `--`; later ones belong to another program."""
    return list(itertools.takewhile(lambda word: word != "--", words))


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError for too many arguments before `--`, or for one with a control character."""
    own_words = _own_words(words)
    if len(own_words) > _MOST_WORDS:
        raise ConfigError(
            f"The command line has {len(own_words):,} words, and at most {_MOST_WORDS:,} are read; put settings into a "
            "file for --config."
        )
    for word in own_words:
        if character := control_character(word):
            raise ConfigError(
                f"The argument {quoted(word)} has {character}, which no name or setting has; remove it."
            )


def before_script(tokens: Sequence[str]) -> list[str]:
    """The command line with `--` before the script of `run` or `tune`, so that all later arguments go to the script."""
    if not tokens or tokens[0] not in _WITH_VALUE:
        return list(tokens)
    place = 1
    while place < len(tokens) and tokens[place].startswith("-") and tokens[place] != "--":
        place += 2 if tokens[place].replace("_", "-") in _WITH_VALUE[tokens[0]] else 1
    if place >= len(tokens) or tokens[place] == "--":
        return list(tokens)
    return [*tokens[:place], "--", *tokens[place:]]
