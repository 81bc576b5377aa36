"""`penstock tune`: the fastest Plan for a script as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import require_folder
from penstock.cli._options import Flag, ModuleFlag, ScriptArguments, ScriptName
from penstock.cli.launch import require_module, require_script
from penstock.errors import ConfigError
from penstock.ladder.settings import TuneConfig

_DEFAULTS = TuneConfig()


def tune(
    script: ScriptName = None,
    *arguments: ScriptArguments,
    config: Annotated[TuneConfig, Parameter(name="*")] = _DEFAULTS,
    module: ModuleFlag = False,
    all_: Annotated[Flag, Parameter(name="--all")] = False,
) -> None:
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
    module
        SCRIPT is the name of a module.
    all_
        List every rung that was not measured, with the reason.
    """
    if script is None:
        raise ConfigError("Say which script to tune: `penstock tune train.py …`, or `-m package.module`.")
    if module:
        require_module(script)
    elif not Path(script).exists() or script.endswith(".py"):
        require_script(script)
    require_folder(config.output)
    from penstock.ladder.show import climbed
    from penstock.tune.process import ScriptCommand
    from penstock.tune.search import tune as search

    command = ScriptCommand(script, tuple(arguments), module, config.procs)
    climbed(lambda show: search(command, config, show), config.output, every=all_)
