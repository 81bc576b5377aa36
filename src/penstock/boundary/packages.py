"""Packages that come with an extra: the one place where their absence becomes a sentence."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import EnvironmentProblem


def package(name: str, need: str, extra: str) -> Any:
    """The package or module `name`. Raises EnvironmentProblem where it cannot be imported: `need`, and how to install
    the extra of Penstock that brings it."""
    try:
        importlib.import_module(name.partition(".")[0])
        return importlib.import_module(name)
    except ImportError:
        raise EnvironmentProblem(f"{need}. Install it with: pip install 'penstock[{extra}]'.") from None
