"""`penstock launch`: start the ranks of a run, watch them, and restart them after a fault."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import read_bytes, shown
from penstock.config.load import read_file
from penstock.config.plan import Plan
from penstock.config.recipes import require_startable
from penstock.errors import ConfigError
from penstock.launch.settings import LaunchSettings

_DEFAULTS = LaunchSettings()
DEGREES = {"dp", "tp", "pp", "cp"}
_VERBS = ("train", "generate", "embed")
"""Verbs that run on several ranks."""


def launch(
    *program: Annotated[str, Parameter(allow_leading_hyphen=True)],
    settings: Annotated[LaunchSettings, Parameter(name="*")] = _DEFAULTS,
) -> int:
    """Start the ranks of a run, and restart them after a fault.

    A rank is a process, usually one for each device. If the Plan of a training names none of dp, tp, pp and cp, the
    ranks are replicas, which split the global batch.

    If a rank fails or hangs, all ranks start again, and `penstock train` resumes from the newest checkpoint. Errors
    that a restart cannot fix end the run at once: configuration, environment, data, checkpoints, numbers and memory.

    Ends with the exit code of the rank that failed first (128 + N for signal N), with 8 after a hang, and with 75 when
    SIGTERM or SIGUSR1 asked the run to stop and it has saved.

        penstock launch --procs 2 -- vit-digits --plan "micro_batch=32 dp=2"
        penstock launch --procs 8 -- train.py --epochs 3

    Parameters
    ----------
    program
        After `--`: the arguments of `penstock train`, `generate MODEL …` or `embed MODEL …`, `SCRIPT.py …`, or `-m
        MODULE …`.
    """
    command = python_arguments(list(program), elastic=settings.elastic)
    from penstock.launch.agent import launch as run

    replicas = names_no_degree(command)
    return run(command, settings, tell=partial(print, file=sys.stderr, flush=True), replicas=replicas)


def names_no_degree(command: list[str]) -> bool:
    """Whether a command trains without naming a parallel degree, so that its ranks are replicas."""
    if command[:3] != ["-m", "penstock", "train"]:
        return False
    from penstock.cli import app

    options = app.parse_args(command[2:], exit_on_error=False, print_error=False)[1].kwargs
    named: set[str] = set()
    file = options.get("config")
    for plan in (options.get("setting__plan"), read_file(file).get("plan") if file else None):
        named |= Plan.named(plan) if isinstance(plan, str) else set(plan or ())
    named |= {name.removeprefix("setting__plan__") for name in options if name.startswith("setting__plan__")}
    return named.isdisjoint(DEGREES)


def python_arguments(program: list[str], *, elastic: bool = False) -> list[str]:
    """The arguments after `python` that start a rank. Raises ConfigError without a program, and the parser's errors for
    options that a verb does not have."""
    if not program:
        raise ConfigError(
            "There is nothing to launch. After --, give the arguments of `penstock train`, as in "
            "`penstock launch --procs 2 -- vit-digits`, or `generate MODEL …`, SCRIPT.py …, or -m MODULE …."
        )
    if program[0] == "-m":
        if len(program) == 1:
            raise ConfigError("-m is given without a module; write -m MODULE ….")
        require_module(program[1])
        return program
    if program[0].endswith(".py"):
        require_script(program[0])
        return program
    arguments = program if program[0] in _VERBS else ["train", *program]
    from penstock.cli import app, check_words

    check_words(arguments)
    # Errors are reported once here, instead of by every rank.
    verb: Any
    verb, bound, *_ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    if not verb.__module__.startswith("penstock."):  # but a flag of the parser's own, such as --help
        raise ConfigError(f"That starts no rank; leave launch out: penstock {shown(' '.join(arguments))}")
    if arguments[0] == "train":
        # Settings that ranks would refuse are refused here, but runs from weights are left to them.
        options = dict(bound.kwargs)
        file = options.get("config")
        if options.get("setting__init_from") is None and "init_from" not in (read_file(file) if file else {}):
            require_startable(verb.read(bound.args, options), elastic=elastic)
    return ["-m", "penstock", *arguments]


def require_script(path: Path | str) -> None:
    """Raise ConfigError for a script that no process could start: none is there, or Python cannot read it."""
    remedy = f"Give its path from {os.getcwd()}, or a module with -m."
    text = read_bytes(path, "The script", limit=1 << 24, error=ConfigError, remedy=remedy)
    try:
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        problem = f"The script {path} is not valid Python, {line}{error.msg}: {(error.text or '').strip()}"
        raise ConfigError(problem) from None
    except ValueError as error:  # a file with a null byte
        raise ConfigError(f"The script {path} is not valid Python: {error}.") from None


def require_module(name: str) -> None:
    """Raise ConfigError if there is no such package. Its modules are not looked up, because that would import it."""
    package, places = name.partition(".")[0], [os.getcwd(), *sys.path]
    if package not in sys.builtin_module_names and not PathFinder.find_spec(package, places):
        raise ConfigError(
            f"There is no module {package!r}: neither in {os.getcwd()} nor installed beside {sys.executable}."
        )
