"""The agent: it starts the ranks again until they end well, restarting cannot help, or the restarts are used up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import ExitCode
from penstock.launch.life import Life
from penstock.launch.nodes import Nodes
from penstock.launch.settings import LaunchSettings
from penstock.launch.signals import STOPS, Requests, StopRequested
from penstock.launch.verdict import Outcome
from penstock.launch.verdict import tell as lines_of
from penstock.leftovers import temporary


def launch(
    program: Sequence[str], settings: LaunchSettings, *, tell: Callable[[str], None], replicas: bool = False
) -> int:
    """Run `program` as this node's ranks, and restart all of them after a fault. Returns the command's exit code.

    `program` is what follows `python`: a script or `-m`, a module, and their arguments. Its ranks must resume by
    themselves, as `penstock train` does from the newest checkpoint that verifies. `tell` shows a line. With `replicas`
    a run's Plan is to follow the number of ranks, as where nodes come and go. When this returns, or is killed, it
    leaves no process behind.

    Raises:
        EnvironmentProblem: the other nodes did not come, or the node that serves the rendezvous was lost.
    """
    with (
        temporary(None, "penstock-launch-") as folder,
        Requests((*STOPS, signal.SIGINT)) as requests,
        _nodes(settings) as nodes,
    ):
        restarts = 0
        while True:
            try:
                with requests.interrupting():
                    assignment = nodes.meet(restarts)
            except StopRequested:
                outcome = Outcome(130 if requests.signal is signal.SIGINT else int(ExitCode.SAVED_REQUEUE))
                nodes.report(outcome)
                return outcome.code
            restarts = assignment.restarts
            if assignment.nodes > 1:
                interface = os.environ.get("GLOO_SOCKET_IFNAME", assignment.interface)
                tell(f"node {assignment.node} of {assignment.nodes}: its ranks talk over {interface}.")
            with Life(
                program,
                assignment,
                settings,
                folder,
                requests=requests,
                nodes=nodes,
                tell=tell,
                replicas=replicas,
            ) as life:
                outcome = life.wait()
            spent = restarts >= settings.max_restarts
            if spent and not outcome.regroup:
                outcome = replace(outcome, final=True)
            if outcome.code != ExitCode.DONE:
                # A node that leaves an elastic run does not end it for the others, if they are enough.
                enough = requests.signal is not None and assignment.nodes > settings.nodes[0]
                nodes.report(replace(outcome, final=outcome.final and not enough))
            for line in [] if outcome.regroup else lines_of(outcome.failures):
                tell(line)
            if outcome.final:
                if spent and restarts and outcome.failures and outcome.code != ExitCode.SAVED_REQUEUE:
                    tell(
                        f"the run has been restarted {restarts} times, as often as --max-restarts allows, and ends "
                        f"here."
                    )
                return outcome.code
            if not outcome.regroup:
                restarts += 1
                tell(
                    f"all ranks are restarted from the newest checkpoint that verifies "
                    f"(restart {restarts} of at most {settings.max_restarts})."
                )


def _nodes(settings: LaunchSettings) -> Nodes:
    if settings.rdzv is None:
        return Nodes(settings.ranks)
    # torch's store prints the C++ stack of every connection that ends, and the agent says what it means. torch reads
    # the level when it is imported.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in os.environ else {}
    os.environ.update(quiet)
    from penstock.launch.meeting import Meeting  # imports torch

    for name in quiet:
        del os.environ[name]  # the ranks' own level is their own
    return Meeting(settings)
