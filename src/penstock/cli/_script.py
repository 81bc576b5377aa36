"""Running a script in this process as plain Python would: arguments, `__main__`, exit code, tracebacks."""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.util
import io
import os
import runpy
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from penstock.errors import ConfigError

_HERE = str(Path(__file__).parent)


def run_script(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a file, folder or zip archive with a `__main__.py`, or with `module` a module, as `python` would.

    `__main__`, `sys.argv` and `sys.path` stay the script's, for its threads and atexit functions. Exceptions of the
    script, SystemExit too, are not caught. Raises ConfigError if there is no such script.
    """
    if not module and not Path(target).exists():
        raise ConfigError(
            f"There is no script {target!r} in {os.getcwd()}; give its path, or a module with -m."
        )
    sys.argv[:] = [target, *arguments]
    archive = not module and (Path(target).is_dir() or zipfile.is_zipfile(target))
    folder = target if archive else os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    if archive or not sys.flags.safe_path:
        # `python` puts the script's folder, or the current one, first; here the folder of this program is first.
        sys.path[0:1] = [folder]
    main = ModuleType("__main__")
    if archive or module:
        spec = PathFinder.find_spec("__main__", [target]) if archive else _spec_of(target)
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None:
            raise ConfigError(f"There is no {'__main__.py in' if archive else 'module'} {target!r} to run.")
        sys.argv[0] = target if archive else str(spec.origin)
        code: CodeType = loader.get_code(spec.name)
        place, cached, main.__package__ = spec.origin, spec.cached, spec.parent
    else:
        # An absolute `__file__`, and `sys.argv[0]` as typed, like Python itself.
        spec, cached, place = None, None, os.path.abspath(target)
        loader = SourceFileLoader("__main__", place)
        with io.open_code(place) as file:
            code = compile(file.read(), place, "exec", dont_inherit=True)
    names = {"__file__": place, "__spec__": spec, "__cached__": cached, "__loader__": loader}
    main.__dict__.update(names, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _spec_of(name: str) -> ModuleSpec | None:
    """The module that `python -m NAME` runs: of a package, its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        package = spec is not None and spec.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") if package else spec
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.__main__".startswith(error.name):
            raise  # something that the package itself imports
        return None


def show(error: BaseException) -> None:
    """Print an exception as Python does when a script ends with it, without the frames that led to the script."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename.startswith(_HERE)
        or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def place_in_script(error: BaseException) -> str | None:
    """`train.py:12`: the innermost line of the user's own code in the traceback of one of our errors."""
    outside = (str(Path(_HERE).parent), str(Path(runpy.__file__).parent), "<frozen ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(outside) and "site-packages" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return None


@contextmanager
def when_imported(name: str, then: Callable[[], None]) -> Iterator[None]:
    """Call `then` right after the first import of the module `name`, or now if it is imported already.

    Importing torch before a script would ignore what the script may still set in its environment.
    """
    if name in sys.modules:
        then()
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that asks all other finders for a module, and returns a spec that calls a function after the module's
    import. The module may be looked up any number of times before, by any thread.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then: Callable[[], None] | None = then
        self._lock = threading.RLock()
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder that asks all others, such as a second one of this class, asks this one in turn.
        if name != self._name or self._then is None or vars(self._asking):
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        self._asking.now = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            del self._asking.now
        loader: Any = None if spec is None else spec.loader
        execute: Any = getattr(loader, "exec_module", None)

        def executed(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the module shows no trace of this
            execute(module)
            self._imported()

        if execute is not None:
            with contextlib.suppress(AttributeError):
                loader.exec_module = executed
        return spec

    def _imported(self) -> None:
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then()
