"""The agent: it starts a node's ranks until they succeed, a restart cannot help, or the restarts are used up."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from penstock.errors import ExitCode
from penstock.launch.nodes import Nodes
from penstock.launch.ranks import Assignment, Rank
from penstock.launch.report import Failure, Outcome, judge, order
from penstock.launch.report import tell as lines_of
from penstock.launch.settings import LaunchSettings, own_cores
from penstock.launch.signals import STOPS, Requests, StopRequested
from penstock.leftovers import temporary

Tell = Callable[[str], None]

_TICK = 0.1
"""Seconds between two checks of the ranks; output is shown at once."""
_OTHERS_REPORT = 1.0
"""Seconds that the other ranks have to report why they failed, before all are killed."""
_STACKS = 5.0
"""Maximum seconds to wait for ranks' stacks: a busy machine is slow to wake a stopped process."""
_SETTLED = 0.3
"""Stacks that have not grown for this many seconds are complete."""
_NO_STACK = "(it did not answer: it waits in the kernel, or had not started)"
_CAUSE = 3.0
"""Seconds to wait for another node's report that it failed first."""
_GOOD: Final = (int(ExitCode.DONE), int(ExitCode.SAVED_REQUEUE), int(ExitCode.INTERRUPTED))


class Life:
    """The ranks of this node, running inside the context; on exit every remaining process is killed."""

    def __init__(
        self, program: Sequence[str], assignment: Assignment, settings: LaunchSettings, folder: Path, *,
        requests: Requests, nodes: Nodes, tell: Tell, replicas: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.requests, self.nodes, self.tell = settings, requests, nodes, tell
        self.assignment = assignment
        self.ranks: list[Rank] = []
        self._regrouping = False
        self._interrupts = 0
        try:
            for local in range(settings.ranks):
                shows_output = assignment.first_rank + local == 0
                cores = own_cores(local, settings.ranks) if settings.bind_cores else ()
                elastic = settings.elastic or replicas
                place = assignment, local, settings.ranks, folder
                self.ranks.append(Rank(program, *place, shows_output, elastic=elastic, cores=cores))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def wait(self) -> Outcome:
        """Forward signals and show output until the ranks have ended. Returns the node's outcome."""
        first_failure: float | None = None
        while True:
            self._pass_on_output()
            self._forward_signals()
            now = time.monotonic()
            ended = [rank.poll() for rank in self.ranks]
            if all(ended):
                break
            if any(rank.code not in (None, *_GOOD) for rank in self.ranks):
                first_failure = first_failure or now
                if now - first_failure > _OTHERS_REPORT:
                    break
            elif any(self._hangs(rank, now) for rank in self.ranks):
                return self._tell_hang()
            if self._interrupts > 1:
                break
            heard = self.nodes.heard()
            if heard is not None and not heard.regroup and heard.code != ExitCode.SAVED_REQUEUE:
                return heard
            self._make_room(heard)
        return self._outcome()

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
        self._show_lines()
        for rank in self.ranks:
            rank.close()

    def _outcome(self) -> Outcome:
        self._pass_on_output()
        ended = [rank for rank in self.ranks if rank.code is not None]
        failures = [failure for rank in ended if (failure := rank.failure()) is not None]
        if self.requests.signal is signal.SIGINT:
            saved = [f for f in failures if f.code == ExitCode.INTERRUPTED and f.text]
            return Outcome(int(ExitCode.INTERRUPTED), order(saved))
        verdict = judge(failures, stopping=self.requests.signal is not None)
        if verdict.code == ExitCode.SAVED_REQUEUE and self.requests.signal is None:
            goes_on = self._regrouping or self._goes_on_elsewhere()
            return replace(verdict, regroup=goes_on, final=not goes_on)
        if self.assignment.nodes == 1:
            return verdict
        if failures and all(failure.consequence for failure in failures):
            # A lost node reports nothing; that it is lost is known only after a long enough silence.
            heard = self._hear(lambda outcome: not outcome.regroup, self.settings.lost_seconds)
            return heard or verdict
        return verdict

    def _goes_on_elsewhere(self) -> bool:
        """Whether this node restarts although its ranks stopped: a stop request on any node stops the ranks of all."""
        if self.assignment.nodes == 1:
            return False
        heard = self._hear(lambda outcome: True)
        return heard is not None and not heard.final

    def _hear(self, accepts: Callable[[Outcome], bool], seconds: float = 0.0) -> Outcome | None:
        deadline, before = time.monotonic() + seconds + _CAUSE, self.requests.signal
        while True:
            heard = self.nodes.heard()
            over = time.monotonic() > deadline or self.requests.signal is not before
            if over or (heard is not None and accepts(heard)):
                return heard
            time.sleep(_TICK)

    def _pass_on_output(self) -> None:
        """Wait a tick for output, and show complete lines with the rank's number."""
        pipes = [rank.pipe for rank in self.ranks if rank.pipe is not None and rank.code is None]
        if pipes:
            ready, _, _ = select.select(pipes, [], [], _TICK)
            if ready:  # lines come in bursts; and the pipe of a process that has ended stays readable
                time.sleep(0.01)
        else:
            time.sleep(_TICK)
        self._show_lines()

    def _show_lines(self) -> None:
        for rank in self.ranks:
            for line in rank.lines():
                self.tell(f"[rank {rank.number}] {line}")

    def _forward_signals(self) -> None:
        for number in self.requests.take():
            again = ""
            if number is signal.SIGINT:
                self._interrupts += 1
                again = " Press Ctrl-C again to end them at once."
            if self._interrupts < 2:
                self.tell(f"{number.name} received: every rank is asked to save and stop.{again}")
                self._ask(number)

    def _ask(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send(number)

    def _make_room(self, heard: Outcome | None) -> None:
        """If a node wants to join, make the ranks save and stop. They agree on the step with the other nodes' ranks."""
        if self._regrouping or not self.nodes.waiting():
            return
        self._regrouping = True
        if heard is None:
            self.tell("another node wants to join: the ranks save and restart with it.")
            self.nodes.report(Outcome(int(ExitCode.SAVED_REQUEUE), final=False, regroup=True))
        self._ask(signal.SIGUSR1)

    def _hangs(self, rank: Rank, now: float) -> bool:
        beat = rank.heartbeat.read()
        if rank.code is not None or not beat.seconds:
            return False  # it has ended, or its program sends no beats
        limit = self.settings.hang_seconds if beat.stepping else self.settings.start_seconds
        return 0 < limit < now - beat.seconds

    def _tell_hang(self) -> Outcome:
        """Find the rank that hangs. All ranks are silent, because the others wait for it."""
        alive = [rank for rank in self.ranks if not rank.poll()]
        beats = {rank: rank.heartbeat.read() for rank in alive}
        stopped = {rank for rank in alive if rank.ask_for_stack()}
        seen = time.monotonic()
        _wait_for_stacks(alive)
        # Not only ranks over their limit: a rank may have begun to wait before the hanging one stopped.
        watched = [rank for rank in alive if beats[rank].seconds or rank in stopped]
        if not watched:
            return self._outcome()  # meanwhile all have ended
        first = min(watched, key=lambda rank: (rank not in stopped, beats[rank].step, beats[rank].seconds))
        beat = beats[first]
        silent = seen - (beat.seconds or first.started)
        where = f"after step {beat.step}" if beat.seconds and beat.stepping else "before its first step"
        state = "; the process was stopped (SIGSTOP or a debugger)" if first in stopped else ""
        stacks = [
            f"It has been silent for {silent:.0f} s, {where}{state}. Its stack:",
            first.read_stack() or _NO_STACK,
        ]
        for rank in alive:
            if rank is not first:
                stacks.append(f"Stack of rank {rank.number}, step {beats[rank].step}:")
                stacks.append(rank.read_stack() or _NO_STACK)
        failure = Failure(first.number, int(ExitCode.HANG), stacks="\n".join(stacks), seconds=time.time())
        return Outcome(int(ExitCode.HANG), (failure,), final=self.requests.signal is not None)


def _wait_for_stacks(ranks: Sequence[Rank]) -> None:
    """Wait until all ranks have written their stacks. A rank that waits in the kernel never does."""
    end, before = time.monotonic() + _STACKS, list[str]()
    while time.monotonic() < end:
        time.sleep(_SETTLED)
        written = [rank.read_stack() for rank in ranks]
        if all(written) and written == before:
            return
        before = written


def launch(program: Sequence[str], settings: LaunchSettings, *, tell: Tell, replicas: bool = False) -> int:
    """Run `program` as this node's ranks, and restart all of them after a fault. Returns the command's exit code.

    `program` is what follows `python`: a script or `-m`, a module, and their arguments. Its ranks must resume by
    themselves, as `penstock train` does from the newest checkpoint that verifies. `tell` shows a line. With `replicas`
    the run's Plan is adapted to the number of ranks, as is always done if nodes may come and go. When this returns, or
    is killed, it leaves no process. Raises EnvironmentProblem if the other nodes did not come, or the node that serves
    the rendezvous was lost.
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
                program, assignment, settings, folder, requests=requests, nodes=nodes, tell=tell, replicas=replicas
            ) as life:  # fmt: skip
                outcome = life.wait()
            outcome = _reported(outcome, assignment, settings, requests, nodes)
            for line in [] if outcome.regroup else lines_of(outcome.failures):
                tell(line)
            if outcome.final:
                spent = restarts and restarts >= settings.max_restarts
                if spent and outcome.failures and outcome.code != ExitCode.SAVED_REQUEUE:
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


def _reported(
    outcome: Outcome, assignment: Assignment, settings: LaunchSettings, requests: Requests, nodes: Nodes
) -> Outcome:
    """Report the outcome of a life to the other nodes. Returns it, as final if no restart is left."""
    if assignment.restarts >= settings.max_restarts and not outcome.regroup:
        outcome = replace(outcome, final=True)
    if outcome.code != ExitCode.DONE:
        # A node that leaves an elastic run does not end it for the others, if enough remain.
        enough = requests.signal is not None and assignment.nodes > settings.nodes[0]
        nodes.report(replace(outcome, final=outcome.final and not enough))
    return outcome


def _nodes(settings: LaunchSettings) -> Nodes:
    if settings.rdzv is None:
        return Nodes(settings.ranks)
    # torch's store prints the C++ stack of every connection that ends; the agent reports this in its own words. torch
    # reads the level when it is imported.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in os.environ else {}
    os.environ.update(quiet)
    from penstock.launch.meeting import Meeting  # imports torch

    for name in quiet:
        del os.environ[name]  # the ranks set their own level
    return Meeting(settings)
