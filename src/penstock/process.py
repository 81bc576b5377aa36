"""Two settings of the whole process that a training step makes, and that Plans taking turns in one process change: the
precision of fp32 matrix products, and whether the host's allocator keeps freed memory.

A training step on a CPU frees its activations and allocates the same sizes again a moment later. By default glibc
returns large blocks to the kernel, which then clears and maps every 4 KiB page again on the next touch. These are tens
of thousands of page faults per step, paid by the operator that touches a page first. If the memory is kept, each page
is mapped only once. The price is that the process's resident size stays at its maximum. Names and numbers are from
`mallopt(3)`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from penstock.config.plan import Matmul
from penstock.errors import EnvironmentProblem

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM = 2**31 - 1
_KEEP_UP_TO = 2**30
# glibc's dynamic thresholds after large blocks were freed, in a process that sets no thresholds.
_DYNAMIC_MMAP = 32 * 2**20
_DYNAMIC_TRIM = 2 * _DYNAMIC_MMAP


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version") else None


def unavailable() -> str | None:
    """Why freed memory cannot be kept on this host, or None if it can."""
    if _glibc() is None:
        return "only glibc's allocator can keep freed memory, and this host uses another"
    return None


_kept = False


def set_host_memory(*, keep: bool) -> bool:
    """Call `keep_freed_memory(keep)` if the setting differs; returns whether it did.

    This is cheap enough for every step, so Plans with different settings can take turns in one process. A
    process that never asked to keep memory is left unchanged, including allocator settings from its
    environment.
    """
    global _kept
    if keep == _kept:
        return False
    keep_freed_memory(keep)
    _kept = keep
    return True


def keep_freed_memory(keep: bool) -> None:
    """Keep freed blocks up to 1 GiB mapped (`keep`), or return them to the kernel as a fresh process would.

    Acts on the whole process, from now on. Raises EnvironmentProblem if the allocator is not glibc's.
    """
    library = _glibc()
    if library is None:
        raise EnvironmentProblem(
            f"plan.host_memory 'keep' is not available here: {unavailable()}; use 'release'."
        )
    mmap, trim = (_KEEP_UP_TO, _NEVER_TRIM) if keep else (_DYNAMIC_MMAP, _DYNAMIC_TRIM)
    if not (library.mallopt(_M_MMAP_THRESHOLD, mmap) and library.mallopt(_M_TRIM_THRESHOLD, trim)):
        raise EnvironmentProblem(
            "glibc refused the allocator thresholds of plan.host_memory; use plan.host_memory 'release'."
        )
    if not keep:
        library.malloc_trim(0)


@contextmanager
def matmul_precision(setting: Matmul) -> Iterator[None]:
    """Inside, fp32 matrix products have the given precision; afterwards the former is restored, even after an error.

    `highest` and `probed` mean fp32 everywhere, so they also turn off the TF32 that cuDNN uses for convolutions by
    default: else a baseline would be faster than its name says. `high` and `medium` allow it.
    """
    import torch  # late: rungs ask for `unavailable` without it

    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    # torch also stores the choice per library, and setting the word does not restore a library's initial "none".
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    choices = [getattr(library, "fp32_precision", None) for library in libraries]
    exact = setting in ("highest", "probed")
    torch.set_float32_matmul_precision("highest" if exact else setting)
    torch.backends.cudnn.allow_tf32 = not exact
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
        for library, choice in zip(libraries, choices):
            if choice is not None:
                library.fp32_precision = choice
