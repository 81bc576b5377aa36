"""C++ kernels for CPUs, compiled on first use by the compiler that torch.compile needs anyway.

The source is plain C++ with OpenMP and no header of torch, so that compiling takes seconds and one library serves every
version of torch. The library is stored in the cache folder (`penstock.config.machine.cache_folder`) under a hash of the
source, the compiler and its flags. Nothing is compiled at import. Without a compiler, `library` returns None and logs
this once, and operators use their Python form.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from penstock.config.machine import cache_folder, is_trusted
from penstock.cpu import this_cpu
from penstock.errors import EnvironmentProblem

__all__ = [
    "TYPES", "address", "direct", "direct_function", "library", "read_number", "sizes", "threads_for", "typed_kernel",
]  # fmt: skip

_log = logging.getLogger(__name__)
Kernels = Literal["fused", "losses", "dropout", "attention", "grouped", "adamw", "integers", "blocks"]
"""Source files, one library each."""
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
)  # fmt: skip
_ISA_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}  # fmt: skip
"""Flags by torch's name of the instruction set; for any other, the compiler's default target is used."""
_OWN_FLAGS: dict[Kernels, tuple[str, ...]] = {
    "attention": ("-mavx512bf16",), "grouped": ("-mavx512bf16",), "adamw": ("-ffp-contract=off",),
    "integers": ("-mavx512vnni", "-mavx512bf16", "-ffp-contract=off"),
    "blocks": ("-mavx512vnni", "-mavx512bf16"),
}  # fmt: skip
"""Flags of single files: attention and grouped products multiply pairs of bf16 values; AdamW and integer products round
every operation separately."""
_LONGEST_BUILD = 300
TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of the dtypes that the kernels read and write."""
_ELEMENTS_PER_THREAD = 1 << 14
"""Fewer elements are computed before another thread has woken up."""


@functools.cache
def library(kernels: Kernels = "fused") -> ctypes.CDLL | None:
    """The compiled kernels. If they cannot be compiled or loaded, it logs a warning and returns None."""
    try:
        return ctypes.CDLL(str(_built(kernels)))
    except (OSError, _CannotBuild, EnvironmentProblem) as problem:
        _log.warning(
            "The fused kernels for CPUs are not available (%s), so slower Python forms replace them. They need a "
            "C++ compiler, such as Debian's package g++; $CXX names another.",
            problem,
        )
        return None


def typed_kernel(kernels: Kernels, name: str, arguments: Mapping[str, tuple[Any, ...]]) -> Any:
    """A function of an available library, with the types of its arguments by name: ctypes then converts numbers itself,
    faster than by making objects of them."""
    kernel = getattr(library(kernels), name)
    if kernel.argtypes is None:
        kernel.argtypes = arguments[name]
    return kernel


class _CannotBuild(Exception):
    """There is no compiler, or it refused the source."""


def _built(kernels: Kernels) -> Path:
    """The path of the library. If it is not in the cache, it is compiled, by one process at a time."""
    compiler = _compiler()
    command = (*_FLAGS, *_ISA_FLAGS.get(this_cpu().isa, ()), *_OWN_FLAGS.get(kernels, ()))
    about = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    source = Path(__file__).parent / f"{kernels}.cpp"
    texts = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256("\0".join((about, *command)).encode() + texts).hexdigest()[:16]
    folder = cache_folder("native")
    path = folder / f"{kernels}-{key}.so"
    if is_trusted(path):
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / f"{path.stem}.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # released with the file; a rank that waited finds the library
        if not is_trusted(path):
            _compile(compiler, command, source, path)
    return path


def _compiler() -> str:
    """The C++ compiler that $CXX names, or the first that is installed."""
    if chosen := os.environ.get("CXX"):
        return chosen
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise _CannotBuild("no C++ compiler was found")


def _compile(compiler: str, flags: tuple[str, ...], source: Path, path: Path) -> None:
    """Compile to a file next to `path`, then rename it, so that no process loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", str(built)], capture_output=True, text=True, check=False,
            timeout=_LONGEST_BUILD,
        )  # fmt: skip
        if done.returncode:
            raise _CannotBuild(f"{compiler} failed: {done.stderr.strip()[:400]}")
        built.chmod(0o700)
        built.replace(path)


def direct(x: torch.Tensor) -> bool:
    """Whether an operator may call its kernel without torch's dispatcher, which takes 100 µs more: the tensor is plain,
    and operators are not being compiled, traced or counted."""
    return type(x) is torch.Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()


def direct_function(
    name: str, forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any], outputs: int = 0
) -> Any:  # fmt: skip
    """An autograd Function with these passes that bypasses torch's dispatcher: see `direct`.

    `save` is called with the context, the inputs and the results of `forward`. The Function returns the first `outputs`
    results, one alone as a tensor; 0 if `forward` returns a single tensor. Profiles list the Function by its `name`.
    """

    def run(ctx: Any, *inputs: Any) -> Any:
        results = forward(*inputs)
        save(ctx, inputs, results)
        return results if not outputs else results[0] if outputs == 1 else results[:outputs]

    passes = {"forward": staticmethod(run), "backward": staticmethod(once_differentiable(backward))}
    return type(name, (torch.autograd.Function,), passes)


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The address of a contiguous tensor's first element; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def read_number(tensor: torch.Tensor) -> float:
    """The value of a 0-d CPU tensor, read from memory as the kernels do: no operator, no waiting."""
    number = tensor.float()
    return ctypes.c_float.from_address(number.data_ptr()).value


def sizes(rows: int, features: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """Numbers of rows and of features as arguments of the kernels."""
    return ctypes.c_int64(rows), ctypes.c_int64(features)


def threads_for(elements: int) -> int:
    """How many of torch's threads are worth waking for a pass over this many elements."""
    return max(1, min(torch.get_num_threads(), elements // _ELEMENTS_PER_THREAD))
