"""The climb's side of rungs with several processes: starts these, gives them tasks, and collects their answers.

They wait for a task while others are timed, so that the climb's own contenders and theirs can take turns. The first
rung that needs them starts them; a rung that fails ends them, and the next rung starts new ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from penstock import errors
from penstock.config.machine import Link
from penstock.errors import ConfigError, EnvironmentProblem, PenstockError, ran_out_of_memory
from penstock.ladder.own import Own
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Subject
from penstock.launch.local import LocalRanks
from penstock.leftovers import temporary

ANSWER_SECONDS = 1200.0
"""Longest wait for an answer: compiling may take minutes on every rank."""
GRACE = 1.0
"""Seconds to wait for other ranks' answers after one has failed, so that the earliest failure is reported."""
_TAIL = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message to a rank."""

    config: LadderConfig
    device: str
    threads: int
    path: list[str]
    """The climb's own `sys.path`, in which the rank finds modules."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The answer of a rank that failed: name, message and traceback of its exception, and when it was raised."""

    name: str
    message: str
    trace: str
    time: float

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """The answer of a rank that raises `error`. Lack of memory has several exception types; ours replaces them."""
        name = "OutOfMemory" if ran_out_of_memory(error) else type(error).__name__
        return cls(name, str(error), "".join(traceback.format_exception(error)), time.time())

    def as_error(self, rank: int, output: str) -> Exception:
        """The error as an exception of this process: our own errors by type, lack of memory as our own too."""
        kind = getattr(errors, self.name, None)
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            return kind(f"On rank {rank}: {self.message}")
        lines = self.message.strip().splitlines()
        error = RuntimeError(f"rank {rank}: {self.name}: {lines[0] if lines else '(no message)'}")
        for note in filter(None, (self.trace, output)):
            error.add_note(note)
        return error


class Team:
    """`config.procs` processes, each with its share of this CPU's threads or a GPU of its own: a `Crew`."""

    def __init__(self, subject: Subject, config: LadderConfig) -> None:
        self._subject, self._config = subject, config
        self._members: list[_Member] = []
        self._scratch = contextlib.ExitStack()
        """The folder of the ranks' logs."""
        self._link: Link | None = None
        self.life = 0

    def link(self) -> Link:
        """The measured link between the processes, which are started for this."""
        if self._link is None:
            self._link = self.ask("link")[0]
        return self._link

    def ask(self, do: str, *arguments: Any) -> list[Any]:
        """Every rank's answer, by rank. If a rank fails, all are ended and the first failure is raised."""
        if not self._members:
            self._start()
        return self._exchange([(do, arguments)] * len(self._members))

    def end(self) -> None:
        """End all processes. Safe to call at any time; the next `ask` starts new ones."""
        for member in self._members:
            member.end()
        if self._members:
            self.life += 1
        self._members = []
        self._scratch.close()

    def _start(self) -> None:
        if isinstance(self._subject, Own) and self._subject.path is None:
            raise ConfigError(
                f"The factory {self._subject.title} cannot be found by other processes; put it into a module and give "
                "it as package.module:function."
            )
        procs = self._config.procs
        ranks = LocalRanks(procs)
        scratch = self._scratch.enter_context(temporary(None, "penstock-ladder-"))
        hello = Hello(
            config=replace(self._config, factory=self._subject.path), device=self._subject.device.type,
            threads=threads_of(procs), path=[entry or os.getcwd() for entry in sys.path],
        )  # fmt: skip
        defaults = {
            "OMP_NUM_THREADS": str(hello.threads),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._members = [_Member(ranks, rank, scratch / f"{rank}.log", defaults) for rank in range(procs)]
        self._exchange([hello] * procs)

    def _exchange(self, messages: list[Any]) -> list[Any]:
        """Send each rank its message, and wait for all answers."""
        try:
            for member, message in zip(self._members, messages, strict=True):
                with contextlib.suppress(BrokenPipeError):  # the rank has ended; `answer` says how
                    member.connection.send(message)
            return self._answers()
        except BaseException:
            self.end()
            raise

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        waiting = {member.connection: member for member in self._members}
        answers: dict[int, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for peer in ready:
                member = waiting.pop(peer)  # type: ignore[call-overload]
                answers[member.rank] = answer = member.answer()
                if isinstance(answer, RankFailure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, RankFailure)}
        if failures:
            rank = min(failures, key=lambda rank: failures[rank].time)
            raise failures[rank].as_error(rank, self._members[rank].last_output())
        if waiting:
            silent = sorted(member.rank for member in waiting.values())
            raise EnvironmentProblem(
                f"Ranks {silent} of {len(self._members)} did not answer within {ANSWER_SECONDS:g} s and were ended."
            )
        return [answers[rank] for rank in range(len(self._members))]


class _Member:
    """The climb's side of one rank."""

    def __init__(self, ranks: LocalRanks, rank: int, log: Path, defaults: dict[str, str]) -> None:
        self.rank = rank
        self._ranks, self._log = ranks, log
        self._process, own_end = ranks.start("penstock.ladder.rank", rank, log=log, defaults=defaults)
        self.connection: connection.Connection[Any, Any] = connection.Connection(own_end.detach())

    def answer(self) -> Any:
        """The rank's message; if it has ended, a failure."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            # A rank that died is the first failure (time 0): its end breaks the connections of the others.
            return RankFailure("Died", f"it {how}", "", 0.0)

    def last_output(self) -> str:
        """The end of the rank's output."""
        return self._log.read_text(errors="replace")[-_TAIL:].strip() if self._log.exists() else ""

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()


def threads_of(procs: int) -> int:
    """Threads of each of `procs` processes: its share of this process's threads."""
    return max(1, torch.get_num_threads() // procs)
