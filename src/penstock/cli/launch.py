"""`penstock launch`: start the ranks of a run, watch them, and restart them after a fault."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from penstock.errors import ConfigError
from penstock.launch.settings import LaunchSettings, parse_nodes, parse_procs

_DEFAULTS = LaunchSettings()


def launch(
    *program: Annotated[str, Parameter(allow_leading_hyphen=True)],
    procs: str = "auto",
    nnodes: str = "1",
    rdzv: str | None = None,
    rdzv_id: str = _DEFAULTS.run_id,
    node_rank: int | None = None,
    max_restarts: int = _DEFAULTS.max_restarts,
    hang_seconds: float = _DEFAULTS.hang_seconds,
    start_seconds: float = _DEFAULTS.start_seconds,
    join_seconds: float = _DEFAULTS.join_seconds,
    settle_seconds: float = _DEFAULTS.settle_seconds,
    lost_seconds: float = _DEFAULTS.lost_seconds,
) -> int:
    """Start the ranks of a run, watch them, and restart them after a fault.

    Ends with the exit code of the rank that failed first (128 + N for signal N), with 8 after a hang, and with 75 when
    SIGTERM or SIGUSR1 asked the run to stop and it has saved. Errors that a restart cannot fix end the run:
    configuration, environment, data, checkpoints, numbers and memory.

    Parameters
    ----------
    program
        After `--`: the arguments of `penstock train`, or `SCRIPT.py …`, or `-m MODULE …`.
    procs
        Ranks on this node; `auto` is one per GPU, or one without GPUs.
    nnodes
        Nodes, `N` or `MIN:MAX`. With MIN:MAX the run goes on with the nodes that are there.
    rdzv
        HOST:PORT at which the agents of all nodes meet; the agent on HOST serves it. Start the same command on each.
    rdzv_id
        Name of the run at that endpoint.
    node_rank
        This node's number. The agents choose one if it is left out.
    max_restarts
        How often all ranks are restarted after a fault.
    hang_seconds
        A rank that finishes no step for so many seconds hangs: all stacks are shown, and it is a fault. 0 turns it off.
    start_seconds
        The same limit until the first step, which may compile.
    join_seconds
        How long to wait for the fewest nodes.
    settle_seconds
        How long to wait for more nodes once there are enough.
    lost_seconds
        A node that has been silent for so many seconds is lost.
    """
    settings = LaunchSettings(
        procs=parse_procs(procs),
        nodes=parse_nodes(nnodes),
        rendezvous=rdzv,
        run_id=rdzv_id,
        node_rank=node_rank,
        max_restarts=max_restarts,
        hang_seconds=hang_seconds,
        start_seconds=start_seconds,
        join_seconds=join_seconds,
        settle_seconds=settle_seconds,
        lost_seconds=lost_seconds,
    )
    command = python_arguments(list(program))
    from penstock.launch.agent import launch as run

    return run(command, settings, tell=_tell)


def python_arguments(program: list[str]) -> list[str]:
    """The words after `python`. Raises ConfigError where nothing is named; unknown options of `train` end it too."""
    if not program:
        raise ConfigError(
            "There is nothing to launch. After --, give the arguments of `penstock train`, as in "
            "`penstock launch --procs 2 -- vit-digits`, or SCRIPT.py …, or -m MODULE …."
        )
    if program[0] == "-m":
        if len(program) == 1:
            raise ConfigError("-m is given without a module; write -m MODULE ….")
        return program
    if program[0].endswith(".py"):
        return program
    arguments = program if program[0] == "train" else ["train", *program]
    from penstock.cli import app

    # Wrong options are reported once here, and not by every rank. The ranks check the settings' values.
    app.parse_args(arguments, exit_on_error=False, print_error=True)
    return ["-m", "penstock", *arguments]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
