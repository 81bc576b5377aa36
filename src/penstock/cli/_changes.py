"""Changes that `penstock run` makes in a script and in the processes that it starts. Free of torch until they import
it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from penstock.cli._script import when_imported
from penstock.errors import PenstockError

_WORKERS = "torch.utils.data."
"""Modules whose processes train nothing."""


class Changes:
    """Mixed precision, or a Plan, which a process gets as soon as it has imported torch. `settings` are the precision
    and its properties; with a Plan, properties alone.

    `watch` is where `penstock tune` listens. Each process that applies something adds a byte to the file `record`.
    """

    def __init__(
        self, settings: dict[str, Any], plan: str | None = None, watch: str | None = None, record: str = ""
    ) -> None:
        self._settings, self._plan, self._address, self._record = settings, plan, watch, record
        self._held = contextlib.ExitStack()
        self._interception: Any = None
        self._watch: Any = None
        self._applied = False
        self.unfit: PenstockError | None = None
        """Why the settings themselves make no sense."""

    def begin(self) -> None:
        """From now on change this process, and those that it starts."""
        base: Any = multiprocessing.process.BaseProcess
        self._held.callback(setattr, base, "start", base.start)
        base.start = self._starting(base.start)
        try:
            self._held.enter_context(when_imported("torch", self._install))
        except BaseException:  # where torch is imported already, settings that make no sense are refused here
            self._held.close()
            raise

    def end(self, ended: BaseException | None) -> bool:
        """Undo `begin`. Returns whether anything was applied, or was to be; if not, the reason has been printed."""
        finished = ended is None or isinstance(ended, SystemExit)
        elsewhere = bool(self._record) and os.path.getsize(self._record) > 0
        nothing_asked = self._plan is None and self._settings["precision"] == "O0"
        self.leave(finished=finished and not elsewhere)
        if self._record:
            os.remove(self._record)
        if self._interception is None and finished and not elsewhere and not nothing_asked:
            torch = "torch" in sys.modules
            why = "torch was imported by a loader of its own" if torch else "the script did not import torch"
            why = f"{why}; programs that it starts, but by multiprocessing, are run as they are"
            say(f"penstock: nothing was accelerated: {self.unfit or why}")
        if self._watch is not None:
            self._watch.end(ended if isinstance(ended, Exception) else None)
        return nothing_asked or self._applied or elsewhere

    def leave(self, *, finished: bool = False) -> None:
        """Undo `begin`; of a script that has `finished`, say if nothing was done."""
        self._held.close()
        if self._interception is not None:
            self._interception.remove(finished=finished)

    def _install(self) -> None:
        from penstock.script import Interception

        settings = dict(self._settings)
        try:
            if self._plan is not None:
                from penstock.tune.switches import ScriptSwitches

                switches: Any = ScriptSwitches(self._plan)
                settings = {**switches.precision, **settings}
                if self._address is not None:
                    from penstock.tune.watch import ScriptWatch

                    switches = self._watch = ScriptWatch(switches, self._address)
                settings["switches"] = switches
            self._interception = Interception(say=say, applied=self._note, **settings).install()
        except PenstockError as error:
            self.unfit = error
            raise

    def _note(self) -> None:
        self._applied = True
        if self._record:
            with open(self._record, "ab") as record:
                record.write(b"1")

    # -- processes that the script starts

    def _starting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(process: Any) -> None:
            if not str(getattr(getattr(process, "_target", None), "__module__", "")).startswith(_WORKERS):
                if not self._record:
                    handle, self._record = tempfile.mkstemp(prefix="penstock-run-")
                    os.close(handle)
                # Fork copies this process as it is; otherwise the new one unpickles this, and begins by it.
                process._penstock = self
            original(process)

        return start

    def __reduce__(self) -> Any:
        return _begin_in_child, (self._settings, self._plan, self._record)


def _begin_in_child(settings: dict[str, Any], plan: str | None, record: str) -> Changes:
    changes = Changes(settings, plan, record=record)
    changes.begin()
    from multiprocessing.util import Finalize

    Finalize(None, changes.leave, exitpriority=0)
    return changes


def say(text: str) -> None:
    """Print a line of the account."""
    print(text, file=sys.stderr, flush=True)
