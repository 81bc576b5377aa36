"""`python -m penstock.launch.worker PROGRAM …`: one rank, as its agent starts it.

It runs a script, or `-m MODULE`, as Python would. In addition the process dies with its agent, writes its threads'
stacks on request while it hangs, reports to the agent why it failed, and ends with the exit code of its error. It ends
by `_exit`, because in a normal exit gloo's threads may abort after all work is done.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from penstock.errors import PenstockError
from penstock.launch.heartbeat import promise
from penstock.launch.report import write_report

STACK: Final = "PENSTOCK_STACK"
"""Environment variable with the path to which stacks are written."""
AGENT: Final = "PENSTOCK_AGENT"
"""Environment variable with the agent's process id."""
DUMP_SIGNAL: Final = signal.SIGUSR2
"""Signal on which the interpreter writes the stacks of all threads to the file, even while it waits in C."""
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    _die_with_agent()
    if path := os.environ.get(STACK):
        stack = open(path, "a")  # noqa: SIM115  # written to until the process ends
        faulthandler.enable(stack, all_threads=True)
        faulthandler.register(DUMP_SIGNAL, stack, all_threads=True)
    if arguments[:3] == ["-m", "penstock", "train"]:
        promise()  # a training loop sends beats; other programs may not
    try:
        _run(list(arguments))
    except SystemExit as ending:
        return _code_of(ending)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  # whatever it is, the agent shows it
        if not write_report(error, _own_part(error.__traceback__)):
            traceback.print_exc()
        return int(error.exit_code) if isinstance(error, PenstockError) else 1
    return 0


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    skipped = {__file__, runpy.__file__, "<frozen runpy>"}
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in skipped:
        first = first.tb_next
    return first or trace


def _code_of(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)  # noqa: T201  # what Python itself does with a text
    return 1


def _die_with_agent() -> None:
    """Make the kernel kill this process when its agent ends in any way. Only Linux can do that."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if (agent := os.environ.get(AGENT)) is not None and os.getppid() != int(agent):
        os._exit(137)  # the agent ended before that


def _leave(code: int) -> None:
    distributed = sys.modules.get("torch.distributed")
    if code == 0 and distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
