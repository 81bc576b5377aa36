"""Kernels in C++ with one term changed, which the tests of these kernels must see."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from penstock.cpu import this_cpu
from penstock.kernels import native

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native._COMPILERS), reason="there is no C++ compiler"
)


def assert_changes_are_seen(
    kernels: native.Kernels,
    changes: Iterable[tuple[str, str, str]],
    use: Callable[[ctypes.CDLL], None],
    hold: Callable[[], None],
    folder: Path,
) -> None:
    """Compile a source without optimisation, as it is and with each change: a file, a text that it has once, and what
    takes its place. After `use` of the library, `hold` passes the first and fails all others."""
    own = Path(native.__file__).parent
    texts = {path.name: path.read_text() for pattern in ("*.cpp", "*.h") for path in own.glob(pattern)}
    flags = [flag for flag in native._FLAGS if flag != "-O3"]
    flags += (*native._ISA_FLAGS.get(this_cpu().isa, ()), *native._OWN_FLAGS.get(kernels, ()))
    source = f"{kernels}.cpp"
    for number, (file, term, other) in enumerate(((source, "", ""), *changes)):
        assert not term or texts[file].count(term) == 1, term
        for name, text in texts.items():
            (folder / name).write_text(text.replace(term, other) if term and name == file else text)
        made = folder / f"{number}.so"
        subprocess.run([native._compiler(), *flags, str(folder / source), "-o", str(made)], check=True)
        use(ctypes.CDLL(str(made)))
        if not term:
            hold()
            continue
        try:
            hold()
        except AssertionError:
            continue
        pytest.fail(f"{other!r} in place of {term!r} is not seen")
