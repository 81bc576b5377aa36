"""Some ranks on this machine, for tests: `spawn(function, world, *args)` runs a function in that many gloo processes.

The processes are forked from one server that has imported `helpers.preloaded` and computed nothing: it starts
once per test run; from then on a group of two is up in a tenth of a second, and no process is forked while threads of
this one hold locks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    start_server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with turn(), tempfile.TemporaryDirectory(prefix="penstock-spawn-") as scratch:
        ranks = [Rank(number, Path(scratch)) for number in range(world)]
        try:
            for rank in ranks:
                rank.start(world, store.port, timeout if group else None)
            return ask(ranks, function, args, timeout)
        finally:
            for rank in ranks:
                rank.end()


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


def ask(ranks: Sequence[Rank], function: Callable[..., R], args: tuple[Any, ...], timeout: float) -> list[R]:
    """Let ranks that were started run `function(*args)`, and return what each returned. Raises as `spawn`."""
    task = pickle.dumps((_module_file(function), pickle.dumps((function, args))))
    for rank in ranks:
        rank.outcome = None
        with contextlib.suppress(OSError):  # it is gone, which is found when its result is waited for
            rank.pipe.send_bytes(task)
    return _collect(ranks, time.monotonic() + timeout, timeout)


class Rank:
    """The parent's side of one process."""

    def __init__(self, number: int, scratch: Path) -> None:
        self.number = number
        self.log = scratch / f"{number}.log"
        self.stack = scratch / f"{number}.stack"
        self.process: Any = None
        self.pipe: Connection
        self.outcome: tuple[float, bool, Any] | None = None
        """When it ended, whether it returned, and what: the result, or the text of the failure."""

    def start(self, world: int, port: int, timeout: float | None) -> None:
        """Start it; without a `timeout` of collectives it joins no group."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        environment = {
            **os.environ,
            **_QUIET,
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
        arguments = (theirs, environment, os.getcwd(), files, timeout)
        self.process = context.Process(target=_live, args=arguments, daemon=True)
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
        if self.process is not None:
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
    with _environment({**os.environ, **_QUIET}):
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
