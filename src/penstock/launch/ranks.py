"""The processes of one node's ranks: starts, reads, signals, and ends them with all their children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.boundary.files import printable
from penstock.errors import ExitCode
from penstock.launch import ELASTIC, LAUNCH, heartbeat, report, worker
from penstock.launch.heartbeat import Heartbeat
from penstock.launch.local import STORE_ELSEWHERE, rank_environment
from penstock.launch.report import Failure

_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Assignment:
    """The position of this node's ranks among all ranks."""

    node: int
    nodes: int
    first_rank: int
    world: int
    master: tuple[str, int]
    """Address and port on which rank 0 will serve the store of its process group."""
    round: int = 0
    """Number of earlier starts of all ranks."""
    restarts: int = 0
    """Number of these starts that came after a fault."""
    launch: str = ""
    """Unique name of the launch."""
    interface: str = ""
    """Network interface by which the other nodes reach this host; empty for a single node."""


class Rank:
    """One rank's process."""

    def __init__(
        self,
        program: Sequence[str], assignment: Assignment, local: int, procs: int, folder: Path, shows_output: bool, *,
        elastic: bool = False, cores: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Start the process. With `shows_output` it writes to this process's output; else the agent shows its lines.
        With `cores` it is bound to these cores, with all that it starts."""
        self.number = assignment.first_rank + local
        self._report = folder / f"{local}.report"
        self._stack = folder / f"{local}.stack"
        for path in (self._report, self._stack):
            path.unlink(missing_ok=True)
        self.heartbeat = Heartbeat.create(folder / f"{local}.beat")
        environment = _environment(assignment, local, procs) | {
            heartbeat.VARIABLE: str(folder / f"{local}.beat"),
            report.VARIABLE: str(self._report),
            worker.STACK: str(self._stack),
            worker.AGENT: str(os.getpid()),
        }
        if elastic:
            environment[ELASTIC] = "1"
        out = None if shows_output else subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, *_flags(), "-m", "penstock.launch.worker", *program],
            env=environment,
            # Rank 0 reads piped input. Reading a terminal would stop it, because it is in the background.
            stdin=None if shows_output and (procs == 1 or not os.isatty(0)) else subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out else None,
            process_group=0,  # so that its loader workers and all other children end with it
        )
        self.pid = self._process.pid
        if cores:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, cores)  # Python has just begun and has a single thread
        self.started = time.monotonic()
        self.pipe = self._process.stdout
        if self.pipe is not None:
            os.set_blocking(self.pipe.fileno(), False)
        self._partial = b""
        self._tail = ""
        self.code: int | None = None
        self.ended = 0.0

    def poll(self) -> bool:
        """Whether it has ended. Its process group stays until `kill`, which ends remaining children."""
        if self.code is None:
            done = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if done is not None:
                self.code = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
                self.ended = time.time()
        return self.code is not None

    def lines(self) -> list[str]:
        """Complete lines that it has written since the last call; once it has ended, all the rest."""
        if self.pipe is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe.fileno(), 65536):
                self._partial += chunk
        head, newline, rest = self._partial.rpartition(b"\n")
        self._partial = rest
        if self.code is not None and rest:
            head, newline, self._partial = head + newline + rest, b"\n", b""
        text = head.decode(errors="replace")
        self._tail = (self._tail + text + "\n")[-_TAIL:] if text else self._tail
        return text.split("\n") if newline else []

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def failure(self) -> Failure | None:
        """How it failed; None if it succeeded."""
        assert self.code is not None
        if self.code == ExitCode.DONE:
            return None
        if (failure := report.read_report(self._report, self.number, self.code)) is not None:
            return failure
        # A process killed by a signal writes no report, but faulthandler may have written its stack.
        stack = self.read_stack() if self.code < 0 else ""
        silent = self.code < 0 or self.code in (ExitCode.SAVED_REQUEUE, ExitCode.INTERRUPTED)
        text = stack or ("" if silent else printable(self._tail).strip())
        return Failure(self.number, self.code, text, False, self.ended)

    def ask_for_stack(self) -> bool:
        """Make it write its threads' stacks, and continue it if it was stopped. Returns whether it was stopped."""
        stopped = _is_stopped(self.pid)
        if not self.poll():
            _signal_main_thread(self.pid, worker.DUMP_SIGNAL)
        if stopped:
            self.send(signal.SIGCONT)
        return stopped

    def read_stack(self) -> str:
        """The stacks written so far; empty if none."""
        with contextlib.suppress(OSError):
            return printable(self._stack.read_text(errors="replace"))
        return ""

    def kill(self) -> None:
        """Kill the process and its children. After this the rank has no process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.code is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.poll()
        self._process.wait()

    def close(self) -> None:
        """Release its pipe and file; call after `kill` and the last `lines`."""
        if self.pipe is not None:
            self.pipe.close()
        self.heartbeat.close()


def _flags() -> list[str]:
    """Options of this interpreter that a child should share, such as -W error."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _environment(assignment: Assignment, local: int, procs: int) -> dict[str, str]:
    """The environment variables of a rank, torchrun's and Penstock's."""
    rank = assignment.first_rank + local
    environment = rank_environment(rank, assignment.world, local, procs, *assignment.master) | {
        "GROUP_RANK": str(assignment.node),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.round),
        LAUNCH: assignment.launch,
    }
    threads = max(1, len(os.sched_getaffinity(0)) // procs) if hasattr(os, "sched_getaffinity") else 1
    chosen = {} if procs == 1 else {"OMP_NUM_THREADS": str(threads)}
    if assignment.interface:  # else gloo resolves the host's own name, which Debian maps to 127.0.1.1
        chosen |= {
            "GLOO_SOCKET_IFNAME": assignment.interface,
            "NCCL_SOCKET_IFNAME": f"={assignment.interface}",
        }
    # Rank 0 serves a new store in each life: a store that outlives them would hold the last life's answers.
    inherited = {key: value for key, value in os.environ.items() if key != STORE_ELSEWHERE}
    return chosen | inherited | environment


def _signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread. A signal to the whole process may go to any thread, while the main thread wakes
    up and continues; its own signal interrupts it where it is.
    """
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc since 2.30
    if tgkill is None or tgkill(pid, pid, int(number)) != 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "Tt"
