"""Running a script in this process as plain Python would: arguments, `__main__`, exit code, tracebacks."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from penstock.errors import ConfigError

_HERE = str(Path(__file__).parent)


def run_script(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a file, folder or zip archive with a `__main__.py`, or with `module` a module, as `python` would.

    Passes on whatever the script raises, SystemExit included. Raises ConfigError if there is no such script.
    """
    if not module and not Path(target).exists():
        raise ConfigError(
            f"There is no script {target!r} in {os.getcwd()}; give its path, or a module with -m."
        )
    with _as_main(target, arguments, module=module):
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif Path(target).is_dir() or zipfile.is_zipfile(target):
            runpy.run_path(target, run_name="__main__")
        else:
            _run_file(target)


def _run_file(target: str) -> None:
    """Do what runpy.run_path does, but with an absolute `__file__` and `sys.argv[0]` as typed, like Python itself."""
    path = os.path.abspath(target)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __spec__=None, __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )  # fmt: skip
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    finally:
        sys.modules["__main__"] = before


@contextmanager
def _as_main(target: str, arguments: Sequence[str], *, module: bool) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the script expects them."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [target, *arguments]
    if not sys.flags.safe_path:
        # `python` puts the script's folder, or the current one, first; here the folder of this program is first.
        sys.path[0:1] = [os.getcwd() if module else os.path.dirname(os.path.realpath(target))]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


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
    """Call `then` right after the first import of the module `name`, or now if that has happened.

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
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and a function to call after it."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # the module shows no trace of this class
        self._loader.exec_module(module)
        self._then()
