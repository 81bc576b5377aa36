"""Kernels in C++ with one term changed, which the tests of these kernels must see."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.cpu import this_cpu
from penstock.kernels import native

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native._COMPILERS), reason="there is no C++ compiler"
)


def changed_terms_are_seen(
    kernels: native.Kernels, changes: Sequence[tuple[str, str]], users: Iterable[ModuleType],
    hold: Callable[[], object], needs: Any = needs_compiler,
) -> Any:  # fmt: skip
    """The test that `hold` sees each change, in thirds: one in `make test-all`, the others in `make test-sweeps`."""

    def test(changes: Sequence[tuple[str, str]], tmp_path: Path) -> None:
        assert_changes_are_seen(kernels, changes, users, hold, tmp_path)

    marks = pytest.mark.slow, pytest.mark.sweep, pytest.mark.sweep
    thirds = [pytest.param(changes[n::3], id=f"third {n}", marks=mark) for n, mark in enumerate(marks)]
    return pytest.mark.parametrize("changes", thirds)(needs(test))


def assert_changes_are_seen(
    kernels: native.Kernels, changes: Iterable[tuple[str, str]], users: Iterable[ModuleType],
    hold: Callable[[], object], folder: Path,
) -> None:  # fmt: skip
    """Compile a source without optimisation, as it is and with each change: a text that it or a header has once, and
    what takes its place. With that in place of the library of the modules `users`, `hold` passes the first and fails
    all others."""
    own, source = Path(native.__file__).parent, f"{kernels}.cpp"
    texts = {path.name: path.read_text() for path in (own / source, *own.glob("*.h"))}
    flags = [flag for flag in native._FLAGS if flag != "-O3"]
    flags += (*native._ISA_FLAGS.get(this_cpu().isa, ()), *native._OWN_FLAGS.get(kernels, ()))
    for number, (term, other) in enumerate((("", ""), *changes)):
        files = [name for name, text in texts.items() if term and term in text]
        assert not term or [texts[name].count(term) for name in files] == [1], term
        for name, text in texts.items():
            (folder / name).write_text(text.replace(term, other) if name in files else text)
        made = folder / f"{number}.so"
        subprocess.run([native._compiler(), *flags, str(folder / source), "-o", str(made)], check=True)
        changed = ctypes.CDLL(str(made))
        with pytest.MonkeyPatch.context() as patch:

            def take(name: native.Kernels = kernels, changed: ctypes.CDLL = changed) -> ctypes.CDLL | None:
                return changed if name == kernels else native.library(name)

            for user in users:
                patch.setattr(user, "library", take)
            if not term:
                hold()
                continue
            try:
                hold()
            except AssertionError:
                continue
        pytest.fail(f"{other!r} in place of {term!r} is not seen")
