"""`penstock run`: mixed precision for a script as it is."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from penstock.boundary.files import quoted
from penstock.cli._options import Flag, ModuleFlag, ScriptArguments, ScriptName
from penstock.cli._script import place_in_script, run_script, show, when_imported
from penstock.config.plan import Plan
from penstock.errors import ConfigError, ExitCode, PenstockError


def run(
    script: ScriptName = None,
    *arguments: ScriptArguments,
    precision: Annotated[str | None, Parameter(env_var="PENSTOCK_PRECISION")] = None,
    plan: str | None = None,
    dtype: Annotated[Literal["auto", "bf16", "fp16"], Parameter(env_var="PENSTOCK_DTYPE")] = "auto",
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    module: ModuleFlag = False,
    strict: Flag = False,
    watch: Annotated[str | None, Parameter(show=False)] = None,
) -> int:
    """Run a training script in mixed precision, or under a Plan, unchanged.

    Options of this command come before SCRIPT. All that follows SCRIPT is passed to it, as after `python`. Output and
    exit code are the script's own; a summary on stderr lists what was applied.

        penstock run --precision O1 train.py --lr 1e-3
        penstock run --plan "precision=O1 optimizer=fused" -m my.trainer

    Parameters
    ----------
    script
        The script, or with -m a module.
    arguments
        The script's own arguments.
    precision
        O0 plain fp32, O1 each operation in its own type, O2 half weights with fp32 masters, O3 half throughout. O1
        if neither this nor a plan is given.
    plan
        Settings of a Plan, such as "precision=O1 optimizer=fused compile=blocks": those that are named are applied,
        and everything else stays as in the script. `penstock tune` finds the fastest.
    dtype
        The half type; auto chooses by the hardware.
    option
        A property of the level, such as loss_scale=1024; may be repeated. docs/how-to/run.md lists them.
    module
        SCRIPT is the name of a module.
    strict
        End with exit code 9 if the script succeeded but nothing was accelerated.
    watch
        The address at which `penstock tune` listens.
    """
    if script is None:
        raise ConfigError(
            "Say what to run: `penstock run --precision O1 train.py …`, or `-m package.module`."
        )
    overrides = dict(_setting(text) for text in option)
    if plan is not None:
        _require_only(plan, precision, dtype, overrides)
    else:
        overrides = {"precision": precision or "O1", "dtype": dtype, **overrides}
    return _run(Changes(overrides, plan, watch), script, arguments, module=module, strict=strict)


def _run(changes: Changes, script: str, arguments: tuple[str, ...], *, module: bool, strict: bool) -> int:
    """Run the script with the changes, which end once its threads have ended too. Returns its exit code."""
    threads = set(threading.enumerate())
    ended: BaseException | None = None
    code = 0
    late = contextlib.ExitStack()
    atexit.register(late.close)  # before the script's own functions, so it is called after them
    changes.begin()
    try:
        run_script(script, arguments, module=module)
    except SystemExit as error:
        ended, code = error, 1 if error.code else 0
    except PenstockError as error:
        ended, code = error, int(error.exit_code)
        place = None if error is changes.unfit else place_in_script(error)
        print(f"penstock: {error}" + (f"\n  at {place}" if place else ""), file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the script's own, shown as Python shows it
        ended, code = error, 1
        show(error)
    except BaseException as error:
        changes.end(error)
        raise
    if any(not thread.daemon for thread in {*threading.enumerate()} - threads):
        # They may still train or save; Python waits for them first.
        late.callback(_end_late, changes, ended, code, strict)
    elif not changes.end(ended) and code == 0 and strict:
        return int(ExitCode.NOTHING_APPLIED)
    if isinstance(ended, SystemExit):
        raise ended
    return code


def _end_late(changes: Changes, ended: BaseException | None, code: int, strict: bool) -> None:
    if not changes.end(ended) and code == 0 and strict:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ExitCode.NOTHING_APPLIED))


_OWN = ("device", "dtype", "level", "precision", "say", "switches")
"""Properties that the command sets itself, or has an option for."""


def _require_only(plan: str, precision: str | None, dtype: str, overrides: dict[str, Any]) -> None:
    """Raise ConfigError for a Plan that cannot be read, and for options that contradict or repeat it."""
    named = Plan.named(plan)
    if precision is not None or dtype != "auto":
        option = f"precision={precision}" if precision is not None else f"dtype={dtype}"
        full_plan = f"precision={precision or 'O1'} {plan}"
        raise ConfigError(
            f"A plan and {option} were both set; write the precision into the plan, as --plan "
            f"{quoted(full_plan, 200)}."
        )
    if overrides and "precision" not in named:
        raise ConfigError(
            f"--option {next(iter(overrides))} is a property of a level of precision, and the plan names none; add "
            "precision=O1 to it."
        )


def _setting(text: str) -> tuple[str, Any]:
    """`loss_scale=1024` as a name and a value."""
    name, equals, word = text.partition("=")
    if not equals or not word or not name.isidentifier() or name in _OWN:
        raise ConfigError(
            f"--option {quoted(text)} is not a setting; write a property of the level and its value, such as "
            "loss_scale=1024."
        )
    if word.lower() in ("true", "false"):
        return name, word.lower() == "true"
    try:
        return name, float(word)
    except ValueError:
        return name, word


# -- the changes that are made in a script, free of torch until the script imports it


class Changes:
    """Applies mixed precision or a Plan to this process as soon as it has imported torch. `settings` are the precision
    and its properties; with a Plan, only properties. `watch` is the address at which `penstock tune` listens.
    """

    def __init__(self, settings: dict[str, Any], plan: str | None = None, watch: str | None = None) -> None:
        self._settings, self._plan, self._address = settings, plan, watch
        self._held = contextlib.ExitStack()
        self._interception: Any = None
        self._watch: Any = None
        self._applied = False
        self.unfit: PenstockError | None = None
        """The error in the settings themselves, if there is one."""

    def begin(self) -> None:
        """Change this process from now on. If torch is imported already, invalid settings raise their error here."""
        self._held.enter_context(when_imported("torch", self._install))

    def end(self, ended: BaseException | None) -> bool:
        """Undo `begin`. Returns whether anything was applied, or nothing was requested; if not, prints the reason."""
        finished = ended is None or isinstance(ended, SystemExit)
        nothing_asked = self._plan is None and self._settings["precision"] == "O0"
        self._held.close()
        if self._interception is not None:
            self._interception.remove(finished=finished)
        elif finished and not nothing_asked:
            torch = "torch" in sys.modules
            why = "torch was imported by a loader of its own" if torch else "the script did not import torch"
            why = f"{why}; programs and processes that it starts run as they are: start ranks with torchrun"
            say(f"penstock: nothing was accelerated: {self.unfit or why}")
        if self._watch is not None:
            self._watch.end(ended if isinstance(ended, Exception) else None)
        return nothing_asked or self._applied

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


def say(text: str) -> None:
    """Print a line of the summary on stderr."""
    print(text, file=sys.stderr, flush=True)
