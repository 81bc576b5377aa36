"""`penstock tune`: the fastest Plan for a script as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import require_folder
from penstock.cli.launch import require_module, require_script
from penstock.errors import ConfigError, ExitCode
from penstock.tune.settings import TuneConfig

_DEFAULTS = TuneConfig()


def tune(
    script: Annotated[str | None, Parameter(allow_leading_hyphen=False)] = None,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    budget: float = _DEFAULTS.budget,
    rounds: int = _DEFAULTS.rounds,
    rungs: str = "",
    skip: str = "",
    procs: int = 1,
    timeout: float = _DEFAULTS.timeout,
    output: str = _DEFAULTS.output,
    module: Annotated[bool, Parameter(name=["--module", "-m"], negative="")] = False,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
) -> int:
    """Find the fastest Plan for a training script, unchanged.

    Options of this command come before SCRIPT. All that follows SCRIPT is passed to it, as after `python`. The script
    is started several times with different settings, which take turns of some optimizer steps each. The last line is
    the command that runs it with the fastest settings.

        penstock tune --budget 300 train.py --lr 1e-3

    Parameters
    ----------
    script
        The script, or with -m a module.
    arguments
        The script's own arguments.
    budget
        Seconds for everything, compiling included.
    rounds
        Rounds of turns, at least, before a difference under 5 % counts.
    rungs
        Rungs or groups of rungs to try, separated by commas, such as half,compile; all by default.
    skip
        Rungs or groups of rungs to leave out.
    procs
        Number of ranks to start the script with, as torchrun does.
    timeout
        Seconds that the script may be silent, for example before its first step.
    output
        Folder of tune.html and tune.json, and of what the script writes to its terminal.
    module
        SCRIPT is the name of a module.
    all_
        List every rung that was not measured, with the reason.
    """
    if script is None:
        raise ConfigError("Say which script to tune: `penstock tune train.py …`, or `-m package.module`.")
    for name, value, least in (
        ("budget", budget, 1),
        ("rounds", rounds, 2),
        ("procs", procs, 1),
        ("timeout", timeout, 1),
    ):
        if not value >= least:
            raise ConfigError(f"--{name} is {value}, but must be at least {least}.")
    if module:
        require_module(script)
    elif not Path(script).exists() or script.endswith(".py"):
        require_script(script)
    require_folder(output)
    from penstock.ladder.show import climbed
    from penstock.tune.process import ScriptCommand
    from penstock.tune.search import tune as search

    config = TuneConfig(
        budget=budget, rounds=rounds, rungs=_names(rungs), skip=_names(skip), output=output, timeout=timeout
    )
    command = ScriptCommand(script, tuple(arguments), module, procs)
    climbed(lambda show: search(command, config, show), output, every=all_)
    return int(ExitCode.DONE)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(",", " ").split()))
