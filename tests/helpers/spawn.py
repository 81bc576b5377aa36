"""Some ranks on this machine, for tests: `spawn(function, world, *args)` runs a function in that many gloo processes,
and `pool(world).run(function, *args)` in processes that are started once and run many cases.

The processes are forked from one server that has imported `helpers.preloaded` and computed nothing: it starts
once per test run; from then on a group of two is up in a tenth of a second, and no process is forked while threads of
this one hold locks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib.util
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_GRACE = 0.5
"""Seconds in which other ranks may still report after the first failure; whoever failed first is then told first."""
_LOG_TAIL = 4000
_turns = 0
"""Turns that this process is in."""


class RankFailed(Exception):
    """A rank raised, died or did not end in time. The message starts with the first such rank and its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def spawn(
    function: Callable[..., R], world: int, *args: Any, timeout: float = 60.0, group: bool = True
) -> list[R]:
    """Run `function(*args)` on `world` ranks of a gloo group on 127.0.0.1, and return what each returned, by rank.

    The function is one of a module (a test module will do), its arguments and result can be pickled; tensors travel by
    value. Each rank has one thread, this process's environment and working folder, and RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as `torchrun` sets them. With `group` false the function
    calls `init_process_group` itself. After it returned all ranks meet at a barrier and leave the group.

    Raises:
        RankFailed: a rank raised, was killed, or the whole took longer than `timeout` seconds; then it holds every
            rank's stack. All processes are gone by then, whatever they were doing.
    """
    ranks = Ranks(world, timeout if group else None)
    try:
        return ranks.run(function, *args, timeout=timeout)
    finally:
        ranks.close()


class Ranks:
    """`world` ranks, started by the first case, in a gloo group whose collectives fail after `patience` seconds.

    A case costs some milliseconds beside its own work. What a case leaves in its processes, the next one finds there:
    functions build what they need and keep nothing. After a failure all ranks are ended, and the next case starts new
    ones.
    """

    def __init__(self, world: int, patience: float | None = 300.0) -> None:
        self.world, self.patience = world, patience
        self._ranks: list[Rank] = []
        self._store: Any = None
        self._ends = contextlib.ExitStack()

    def run(self, function: Callable[..., R], *args: Any, timeout: float = 60.0) -> list[R]:
        """What `function(*args)` returned on each rank, by rank. Takes and raises what `spawn` does."""
        with turn():
            try:
                if not self._ranks:
                    self._start()
                self._signal(signal.SIGCONT)
                results = _ask(self._ranks, function, args, timeout)
                self._signal(signal.SIGSTOP)
                return results
            except BaseException:
                self.close()
                raise

    def _signal(self, number: signal.Signals) -> None:
        """Let all ranks stand still, or go on. Gloo has a thread for each group that a rank was ever in, which looks
        for messages a hundred times a second: ranks that wait for the next case would take half of two cores.
        """
        for rank in self._ranks:
            os.kill(rank.process.pid, number)

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        start_server()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        scratch = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-ranks-"))
        for number in range(self.world):
            self._ranks.append(Rank(number, self.world, self._store.port, self.patience, Path(scratch)))
            self._ends.callback(self._ranks[-1].end)
        pids = [str(rank.process.pid) for rank in self._ranks]
        # It ends the ranks when this process is gone: those that stand still cannot do so themselves.
        command = ["sh", "-c", 'read line; kill -9 "$@"', "guard", *pids]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._ends.callback(guard.communicate)
        self._ends.callback(guard.kill)

    def close(self) -> None:
        """End all ranks."""
        self._ends.close()
        self._ranks, self._store = [], None


@cache
def pool(world: int) -> Ranks:
    """The ranks of a group of so many, which live until this process ends."""
    made = Ranks(world)
    atexit.register(made.close)
    return made


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait until at most one group of ranks for each core computes, over all test processes of this machine.

    Ranks of a group wait for each other many times a millisecond. Where far more ranks run than there are cores, each
    wait lasts until the scheduler comes round. On two cores two groups at a time were faster than one (whose waits
    leave a core idle) and than three: 147, 180 and 166 s for the tests of this suite that start ranks. A turn within a
    turn is the same turn.
    """
    global _turns
    number = os.getpid() % len(os.sched_getaffinity(0))
    with Path(tempfile.gettempdir(), f"penstock-ranks-{os.getuid()}-{number}.lock").open("a") as file:
        if not _turns:
            fcntl.flock(file, fcntl.LOCK_EX)
        _turns += 1
        try:
            yield
        finally:
            _turns -= 1


def _ask(ranks: Sequence[Rank], function: Callable[..., R], args: tuple[Any, ...], timeout: float) -> list[R]:
    task = pickle.dumps((_module_file(function), pickle.dumps((function, args))))
    for rank in ranks:
        rank.outcome = None
        with contextlib.suppress(OSError):  # it is gone, which is found when its result is waited for
            rank.pipe.send_bytes(task)
    return _collect(ranks, time.monotonic() + timeout, timeout)


class Rank:
    """The parent's side of one process, which joins no group without the `patience` of its collectives."""

    def __init__(self, number: int, world: int, port: int, patience: float | None, scratch: Path) -> None:
        self.number = number
        self.log = scratch / f"{number}.log"
        self.stack = scratch / f"{number}.stack"
        self.outcome: tuple[float, bool, Any] | None = None
        """When it ended, whether it returned, and what: the result, or the text of the failure."""
        context = multiprocessing.get_context("forkserver")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        environment = {
            **os.environ,
            **QUIET,
            "RANK": str(self.number),
            "LOCAL_RANK": str(self.number),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, nobody hosts another
            "GLOO_SOCKET_IFNAME": "lo",
        }
        files = (str(self.log), str(self.stack))
        arguments = (theirs, environment, os.getcwd(), files, patience)
        self.process: Any = context.Process(target=_live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        """Take the report that is there, or note that the process is gone without one."""
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            how = (
                f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with {code}"
            )
            # Nobody can fail before the rank whose death broke the others' connections.
            self.outcome = (-1.0, False, f"It {how} before it returned.")

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def said(self) -> str:
        text = self.log.read_text(errors="replace")[-_LOG_TAIL:] if self.log.exists() else ""
        return f"\n--- output of rank {self.number} ---\n{text}" if text.strip() else ""


def _collect(ranks: Sequence[Rank], deadline: float, timeout: float) -> list[Any]:
    """Every rank's result, or the first failure."""
    while waiting := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        for rank in waiting:
            if rank.pipe in ready:
                rank.listen()
        if any(rank.outcome and not rank.outcome[1] for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if not ready:
            break
    failed = sorted((r for r in ranks if r.outcome and not r.outcome[1]), key=_when)
    if failed:
        told = [
            f"Rank {r.number} of {len(ranks)} failed.\n{r.outcome[2]}{r.said()}" for r in failed if r.outcome
        ]
        raise RankFailed(failed[0].number, "\n".join(told))
    silent = [rank for rank in ranks if rank.outcome is None]
    if silent:
        stacks = "\n".join(_stack(rank) for rank in silent)
        raise RankFailed(
            silent[0].number,
            f"Ranks {[rank.number for rank in silent]} of {len(ranks)} did not end within {timeout:g} s.\n{stacks}",
        )
    return [rank.outcome[2] for rank in ranks if rank.outcome]


def _when(rank: Rank) -> float:
    assert rank.outcome is not None
    return rank.outcome[0]


def _stack(rank: Rank) -> str:
    """Where a process stands that does not answer."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR2)
    time.sleep(0.2)
    text = rank.stack.read_text() if rank.stack.exists() else ""
    return f"--- stack of rank {rank.number} ---\n{text or '(it did not answer)'}{rank.said()}"


def start_server() -> None:
    """Start the server that ranks are forked from, single-threaded whatever this process is."""
    with _environment({**os.environ, **QUIET}):
        multiprocessing.get_context("forkserver").set_forkserver_preload(["helpers.preloaded"])
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _module_file(function: Callable[..., Any]) -> tuple[str, str]:
    """Name and file of a function's module: pytest's import mode leaves test modules where no import finds them."""
    return function.__module__, getattr(sys.modules[function.__module__], "__file__", None) or ""


def _import(name: str, file: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _end_with_parent() -> None:
    """Runs in a thread of a rank: the server would keep it alive after the test run was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _live(
    pipe: Connection, environment: dict[str, str], folder: str, files: tuple[str, str], timeout: float | None
) -> None:
    """One rank, from its first breath: prepare, and run and report until nothing more is asked or something failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(files[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(files[1], "w")  # noqa: SIM115  # faulthandler writes to it until the process ends
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    done, joined = True, False
    while done:
        try:
            module, task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            if not joined:
                joined = True
                _join(timeout)
            report = pickle.dumps((time.monotonic(), True, _run(module, task)))
        except BaseException:  # whatever it is, the parent tells it
            done, report = False, pickle.dumps((time.monotonic(), False, traceback.format_exc()))
        pipe.send_bytes(report)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort in an orderly exit, after all work is done


def _join(timeout: float | None) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if timeout is not None:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))


def _run(module: tuple[str, str], task: bytes) -> Any:
    import torch
    from torch import distributed

    torch.manual_seed(0)
    _import(*module)
    function, args = pickle.loads(task)
    result = function(*args)
    if distributed.is_initialized():
        distributed.barrier()
    return result
