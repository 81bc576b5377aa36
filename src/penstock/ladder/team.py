"""The processes that rungs of several are measured in, seen from the climb that starts them.

They wait for a line while others are timed, so the climb's own contenders and theirs can take turns. The first rung
that needs them starts them; a rung that fails ends them, and the next one starts others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock import errors
from penstock.config.load import to_dict
from penstock.config.rules import require
from penstock.errors import ConfigError, EnvironmentProblem, OutOfMemory, PenstockError
from penstock.ladder.measure import LossRun
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Own, Subject

ANSWER_SECONDS = 1200.0
"""How long the climb waits for an answer: compiling may take minutes on every rank."""
GRACE = 1.0
"""Seconds in which other ranks may still answer after one has failed: whoever failed first is told."""
_TAIL = 2000


class TeamContender:
    """One setting, built and warm on every rank."""

    def __init__(self, team: Team, setting: Setting, key: int, seed: int) -> None:
        self._team, self._key = team, key
        self.setting = setting
        answers = team.ask("contend", key=key, setting=written(setting), seed=seed)
        self._life = team.life
        self.step_seconds: float = max(answer["step"] for answer in answers)
        compiled = [answer["compile"] for answer in answers if answer["compile"] is not None]
        self.compile_seconds: float | None = max(compiled, default=None)

    @property
    def alive(self) -> bool:
        """Whether the processes that hold it are still there."""
        return self._team.life == self._life

    def timed(self, steps: int) -> float:
        """Seconds per step over so many steps, of the slowest rank."""
        return float(max(self._team.ask("timed", key=self._key, steps=steps)))

    def memory(self) -> list[int]:
        """Peak bytes of one step, by rank."""
        return [int(answer) for answer in self._team.ask("memory", key=self._key)]

    def close(self) -> None:
        """Have the ranks let go of it."""
        if self.alive:
            self._team.ask("drop", key=self._key)


class Team:
    """`config.procs` processes, each with its share of this CPU's threads or a GPU of its own."""

    def __init__(self, subject: Subject, config: LadderConfig) -> None:
        self._subject, self._config = subject, config
        self._members: list[_Member] = []
        self._keys = itertools.count()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None
        self._link: dict[str, float] | None = None
        self.life = 0
        """Counts how often the processes ended."""

    def contend(self, setting: Setting, seed: int) -> TeamContender:
        """Build and warm up a setting on all ranks. Raises what the first rank raised."""
        machine = None if setting.model is None else self._subject.machine
        require(setting.plan, setting.model, machine, run=True)
        return TeamContender(self, setting, next(self._keys), seed)

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """Losses over all ranks and gradient norms of some steps."""
        answer = self.ask("trained", setting=written(setting), seed=seed, steps=steps)[0]
        return LossRun(answer["losses"], answer["norms"])

    def link(self) -> dict[str, float]:
        """`bandwidth` of a large all-reduce between the ranks, in bytes per second, and `seconds` of a small one."""
        if self._link is None:
            answers = self.ask("link")
            self._link = {
                "bandwidth": min(answer["bandwidth"] for answer in answers),
                "seconds": max(answer["seconds"] for answer in answers),
            }
        return self._link

    def ask(self, do: str, **task: Any) -> list[Any]:
        """Every rank's answer, by rank. If one fails all are ended, and what the first raised is raised."""
        if not self._members:
            self._start()
        try:
            for member in self._members:
                member.send({"do": do, **task})
            return self._answers()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End all processes. Safe to call at any time; the next question starts others."""
        for member in self._members:
            member.end()
        if self._members:
            self.life += 1
        self._members = []
        self._store = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if isinstance(self._subject, Own) and self._subject.path is None:
            raise ConfigError(
                f"The factory {self._subject.title} cannot be found by other processes; put it into a module and give "
                "it as package.module:function."
            )
        procs = self._config.procs
        # The store is the climb's: ranks that end never take it along, and no port has to be guessed.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-ladder-")
        threads = threads_of(procs)
        hello = {
            "config": to_dict(self._config) | {"factory": self._subject.path},
            "machine": to_dict(self._subject.machine),
            "device": self._subject.device.type,
            "threads": threads,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        try:
            for rank in range(procs):
                log = Path(self._scratch.name) / f"{rank}.log"
                self._members.append(_Member(rank, procs, self._store.port, threads, log))
            for member in self._members:
                member.send(hello)
            self._answers()
        except BaseException:
            self.end()
            raise

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.output, selectors.EVENT_READ, member)
            while len(answers) < len(self._members):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    answer = key.data.read()
                    if answer is not None:
                        answers[key.data.rank] = answer
                        selector.unregister(key.fileobj)
                        if "error" in answer:
                            deadline = min(deadline, time.monotonic() + GRACE)
        failed = [(answer["time"], rank) for rank, answer in answers.items() if "error" in answer]
        if failed:
            _, rank = min(failed)
            raise as_error(answers[rank], rank, self._members[rank].said())
        if len(answers) < len(self._members):
            silent = sorted(member.rank for member in self._members if member.rank not in answers)
            raise EnvironmentProblem(
                f"Ranks {silent} of {len(self._members)} did not answer within {ANSWER_SECONDS:g} s and were ended."
            )
        return [answers[rank]["result"] for rank in range(len(self._members))]


class _Member:
    """The climb's side of one rank."""

    def __init__(self, rank: int, procs: int, port: int, threads: int, log: Path) -> None:
        self.rank = rank
        self._log = log
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(procs),
            "LOCAL_WORLD_SIZE": str(procs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody else hosts a store
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.ladder.rank"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._partial = b""

    def send(self, task: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone; `read` tells how
            self._input.write(json.dumps(task).encode() + b"\n")
            self._input.flush()

    def read(self) -> dict[str, Any] | None:
        """The answer that is there, None while it is not whole; an error for a rank that is gone."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            # Nobody can fail before the rank whose death broke the others' connections.
            return {"error": "Died", "message": f"it {how}", "trace": "", "time": 0.0}
        self._partial += chunk
        line, newline, rest = self._partial.partition(b"\n")
        if not newline:
            return None
        self._partial = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def said(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(errors="replace")[-_TAIL:].strip() if self._log.exists() else ""

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self.output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def threads_of(procs: int) -> int:
    """Threads of each of so many processes: its share of those that this one computes with."""
    return max(1, torch.get_num_threads() // procs)


def written(setting: Setting) -> dict[str, Any]:
    """A Setting as JSON values."""
    return {
        "model": None if setting.model is None else to_dict(setting.model),
        "plan": setting.plan.line(),
    }


def as_error(answer: dict[str, Any], rank: int, said: str) -> Exception:
    """What a rank raised, as this process would have: our own errors and lack of memory as what they are."""
    name, message = answer["error"], answer["message"]
    if name in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in message:
        return OutOfMemory(f"On rank {rank}: {message}")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PenstockError):
        return kind(f"On rank {rank}: {message}")
    lines = message.strip().splitlines()
    error = RuntimeError(f"rank {rank}: {name}: {lines[0] if lines else '(no message)'}")
    for note in (answer["trace"], said):
        if note:
            error.add_note(note)
    return error
