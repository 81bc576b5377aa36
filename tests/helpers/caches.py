"""Cache folders of tests: each has its own, and all share the compiled kernels."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parents[2] / "build" / "cache"
"""The cache of what is no single test's: modules while they are collected, and fixtures that several tests share."""


def new_cache(folder: Path) -> Path:
    """Make `folder` an empty cache, for `$PENSTOCK_CACHE` to name, and return it.

    Its kernels in C++ are those of `SHARED`, which no run can mistake: a library is named by a hash of its source, the
    compiler and the flags. Otherwise each rank that a test starts would compile its own, for two to five seconds.
    """
    libraries = SHARED / "native"
    libraries.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "native").symlink_to(libraries, target_is_directory=True)
    return folder
