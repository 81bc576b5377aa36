"""One life of a node's ranks: from their start until all have ended."""

from __future__ import annotations

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
from penstock.launch.settings import LaunchSettings, own_cores
from penstock.launch.signals import Requests
from penstock.launch.verdict import Failure, Outcome, judge, order

Tell = Callable[[str], None]

_TICK = 0.1
"""Seconds between two checks of the ranks; output is passed on at once."""
_OTHERS_REPORT = 1.0
"""Seconds that the other ranks have to report why they failed too, before all are killed."""
_STACKS = 5.0
"""The most seconds that ranks have to write their stacks: a busy machine is slow to wake a stopped process."""
_SETTLED = 0.3
"""Seconds after which stacks that have not grown are complete."""
_CAUSE = 3.0
"""Seconds in which another node may report that it failed first."""
_GOOD: Final = (int(ExitCode.DONE), int(ExitCode.SAVED_REQUEUE), int(ExitCode.INTERRUPTED))


class Life:
    """The ranks of this node, running while entered: at the end every process that is left is killed."""

    def __init__(
        self,
        program: Sequence[str],
        assignment: Assignment,
        settings: LaunchSettings,
        folder: Path,
        *,
        requests: Requests,
        nodes: Nodes,
        tell: Tell,
        replicas: bool = False,
    ) -> None:
        self.settings, self.requests, self.nodes, self.tell = settings, requests, nodes, tell
        self.assignment = assignment
        self.ranks: list[Rank] = []
        self._regrouping = False
        self._interrupts = 0
        try:
            for local in range(settings.ranks):
                seen = assignment.first_rank + local == 0
                rank = Rank(
                    program,
                    assignment,
                    local,
                    settings.ranks,
                    folder,
                    seen,
                    elastic=settings.elastic or replicas,
                    cores=own_cores(local, settings.ranks) if settings.bind_cores else (),
                )
                self.ranks.append(rank)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def wait(self) -> Outcome:
        """Forward signals and pass on output until the ranks have ended. Returns the node's outcome."""
        first_failure: float | None = None
        while True:
            self._pass_on_output()
            self._forward()
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
            saved = [one for one in failures if one.code == ExitCode.INTERRUPTED and one.text]
            return Outcome(int(ExitCode.INTERRUPTED), order(saved))
        own = judge(failures, stopping=self.requests.signal is not None)
        if own.code == ExitCode.SAVED_REQUEUE and self.requests.signal is None:
            again = self._regrouping or self._goes_on_elsewhere()
            return replace(own, regroup=again, final=not again)
        if self.assignment.nodes == 1:
            return own
        if failures and all(failure.consequence for failure in failures):
            # A lost node reports nothing. It is known only after it has been silent for long enough.
            heard = self._hear(lambda outcome: not outcome.regroup, self.settings.lost_seconds)
            return heard or own
        return own

    def _goes_on_elsewhere(self) -> bool:
        """Whether this node restarts although its ranks stopped: ranks of all nodes stop when any node is asked to."""
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
            if ready:  # lines come in bursts; a pipe whose writer has just ended is readable for ever
                time.sleep(0.01)
        else:
            time.sleep(_TICK)
        self._show_lines()

    def _show_lines(self) -> None:
        for rank in self.ranks:
            for line in rank.lines():
                self.tell(f"[rank {rank.number}] {line}")

    def _forward(self) -> None:
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
        """Have the ranks save and stop if a node wants to join. They agree on the step with the other nodes' ranks."""
        if self._regrouping or not self.nodes.waiting():
            return
        self._regrouping = True
        if heard is None:
            self.tell("another node wants to join: the ranks save and restart with it.")
            self.nodes.report(Outcome(int(ExitCode.SAVED_REQUEUE), final=False, regroup=True))
        self._ask(signal.SIGUSR1)

    def _hangs(self, rank: Rank, now: float) -> bool:
        beat = rank.heartbeat.read()
        if rank.code is not None or not beat.count:
            return False  # ended, or a program that does not beat
        limit = self.settings.hang_seconds if beat.stepping else self.settings.start_seconds
        return 0 < limit < now - beat.seconds

    def _tell_hang(self) -> Outcome:
        """Name the rank that hangs. The others wait for it, so that all are silent."""
        alive = [rank for rank in self.ranks if not rank.poll()]
        beats = {rank.number: rank.heartbeat.read() for rank in alive}
        stopped = {rank.number for rank in alive if rank.ask_for_stack()}
        seen = time.monotonic()
        _wait_for_stacks(alive)
        # Not only ranks whose time is up: one that waits may have begun to wait before the other stopped.
        watched = [rank for rank in alive if beats[rank.number].count or rank.number in stopped]
        if not watched:
            return self._outcome()  # they have all ended after all
        first = min(
            watched, key=lambda r: (r.number not in stopped, beats[r.number].step, beats[r.number].seconds)
        )
        beat = beats[first.number]
        silent = seen - (beat.seconds if beat.count else first.started)
        where = f"after step {beat.step}" if beat.count and beat.stepping else "before its first step"
        state = "; the process was stopped (SIGSTOP or a debugger)" if first.number in stopped else ""
        stacks = [f"It has been silent for {silent:.0f} s, {where}{state}. Its stack:", first.stack()]
        for rank in alive:
            if rank is not first:
                stacks += [f"Stack of rank {rank.number}, step {beats[rank.number].step}:", rank.stack()]
        failure = Failure(first.number, int(ExitCode.HANG), stacks="\n".join(stacks), seconds=time.time())
        return Outcome(int(ExitCode.HANG), (failure,), final=self.requests.signal is not None)


def _wait_for_stacks(ranks: Sequence[Rank]) -> None:
    """Wait until all that were asked have written theirs. One that waits in the kernel never does."""
    end, before = time.monotonic() + _STACKS, list[str]()
    while time.monotonic() < end:
        time.sleep(_SETTLED)
        written = [rank.read_stack() for rank in ranks]
        if all(written) and written == before:
            return
        before = written
