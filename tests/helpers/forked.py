"""Python programs that start in a tenth of a second, forked from the server of `helpers.spawn` as its ranks are.

`Popen` takes the place of `subprocess.Popen` for `[sys.executable, "-m", MODULE, …]` and `[sys.executable, SCRIPT, …]`.
A new interpreter that imports torch takes two to four seconds of processor time; that is left to the tests of just
that: how `penstock launch` starts its ranks (`tests/launch`, `tests/end_to_end`), what a script's environment does.

Such a program has an environment, a working folder, descriptors, signals and a process group of its own. It shares
what the server imported, and its seed of hashes. Ranks of an agent that was forked are forked by the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import reduction, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from helpers.spawn import start_server

_LAST = 1 << 12
"""Descriptors from here on are taken to be closed."""
_forked = False
"""Whether this process is such a program."""
_PATCHED: Final = ("penstock.launch.ranks",)
"""Modules of ours whose programs are forked too, in a program that was."""


class Popen:
    """A program, as `subprocess.Popen` would start it. `stdin` is empty where none is given."""

    def __init__(
        self, args: Sequence[str], *, stdin: Any = None, stdout: Any = None, stderr: Any = None,
        env: Mapping[str, str] | None = None, cwd: Path | str | None = None, process_group: int | None = None,
        start_new_session: bool = False, pass_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.args = args
        self.stdout: io.FileIO | None = None
        flags, words = _split(args)
        descriptors = {number: number for number in pass_fds}
        with contextlib.ExitStack() as ours:
            for number, given in enumerate((stdin, stdout, stderr)):
                if given == subprocess.PIPE and number == 1:
                    reading, descriptors[1] = os.pipe()
                    ours.callback(os.close, descriptors[1])
                    self.stdout = io.FileIO(reading)
                elif given == subprocess.STDOUT:
                    descriptors[2] = descriptors.get(1, 1)
                elif given == subprocess.DEVNULL or (number == 0 and given is None):
                    descriptors[number] = os.open(os.devnull, os.O_RDWR)
                    ours.callback(os.close, descriptors[number])
                else:
                    descriptors[number] = (
                        number if given is None else getattr(given, "fileno", lambda g=given: g)()
                    )
            program = _Program(
                flags, words, dict(os.environ if env is None else env), str(cwd or os.getcwd()),
                0 if start_new_session else process_group, start_new_session,
            )  # fmt: skip
            self._process: Any = _Child(program, descriptors) if _forked else _served(program, descriptors)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def run_python(
    words: Sequence[str], scratch: Path, *, timeout: float = 300.0, **options: Any
) -> tuple[int, str, str]:
    """Run `python WORDS` to its end. Returns its exit code, what it wrote on stdout and what on stderr; both go through
    files in the folder `scratch`.
    """
    names = [scratch / f"forked.{kind}" for kind in ("stdout", "stderr")]
    with names[0].open("wb") as out, names[1].open("wb") as error:
        process = Popen([sys.executable, *words], stdout=out, stderr=error, **options)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    out_text, error_text = (name.read_text(encoding="utf-8", errors="replace") for name in names)
    return code, out_text, error_text


def instead() -> ModuleType:
    """The module `subprocess`, with this `Popen`: to be put in its place where a module of ours starts programs."""
    module = ModuleType("subprocess")
    vars(module).update(vars(subprocess) | {"Popen": Popen})
    return module


class _Program:
    """All that a program is started with, but its descriptors."""

    def __init__(
        self, flags: list[str], words: list[str], env: dict[str, str], folder: str, group: int | None, session: bool,
    ) -> None:  # fmt: skip
        self.flags, self.words, self.env, self.folder = flags, words, env, folder
        self.group, self.session = group, session

    def become(self, descriptors: dict[int, int]) -> None:
        """Run in this process, which ends with it."""
        global _forked
        code = 70
        try:
            _forked = True
            os.environ.clear()
            os.environ.update(self.env)
            os.chdir(self.folder)
            if self.session:
                os.setsid()
            elif self.group is not None:
                os.setpgid(0, self.group)
            _take(descriptors)
            _forget()
            for flag in self.flags:
                if flag.startswith("-W"):
                    import warnings

                    warnings.simplefilter(flag[2:])  # type: ignore[arg-type]
            for place in reversed(self.env.get("PYTHONPATH", "").split(os.pathsep)):
                if place and place not in sys.path:
                    sys.path.insert(0, place)
            for name in _PATCHED:
                vars(__import__(name, fromlist=["_"]))["subprocess"] = instead()
            from penstock.launch import worker

            if self.words[:2] == ["-m", worker.__name__]:
                self.words = self.words[2:]
            worker._leave(worker.main(self.words))
        finally:
            os._exit(code)


class _Child:
    """A program that this process forks itself."""

    def __init__(self, program: _Program, descriptors: dict[int, int]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            program.become(descriptors)
        if program.group is not None:
            with contextlib.suppress(OSError):  # it may have done so, or have ended
                os.setpgid(self.pid, program.group)

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def join(self, timeout: float | None) -> None:
        assert timeout is None
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Handed:
    """A descriptor on its way to a process of the server."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, handed: Any) -> None:
        self.number = handed.detach()


def _served(program: _Program, descriptors: dict[int, int]) -> Any:
    start_server()
    handed = {number: _Handed(ours) for number, ours in descriptors.items()}
    process = multiprocessing.get_context("forkserver").Process(
        target=_begin, args=(program, handed), daemon=True
    )
    process.start()
    return process


def _begin(program: _Program, handed: dict[int, _Handed]) -> None:
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # it may start processes of its own
    program.become({number: each.number for number, each in handed.items()})


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter, and what it is to run. All options but -W are those of the server already."""
    assert args[0] == sys.executable, args
    flags, words = [], list(args[1:])
    while words[0].startswith("-") and words[0] != "-m":
        flags.append(words.pop(0))
    assert words[0] == "-m" or words[0].endswith(".py"), args
    return flags, words


def _take(descriptors: dict[int, int]) -> None:
    """Have the descriptors under their numbers, and no others."""
    held = {number: fcntl.fcntl(ours, fcntl.F_DUPFD, 1 << 8) for number, ours in descriptors.items()}
    for number, ours in held.items():
        os.dup2(ours, number)
    first = 3
    for number in [*sorted(number for number in held if number > 2), _LAST]:
        os.closerange(first, number)
        first = number + 1
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for as long as the process lives


def _forget() -> None:
    """Let nothing that was planned for the end of the process that this is a copy of happen at its own."""
    atexit._clear()
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()
    finalizers._registered_with_atexit = False
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
