"""Optional packages: the one place that turns their absence into an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import EnvironmentProblem


def package(name: str, need: str, extra: str) -> Any:
    """Import the package or module `name`. Raises EnvironmentProblem where it is missing; the message is `need` and how
    to install the extra of Penstock that includes it."""
    try:
        importlib.import_module(name.partition(".")[0])
        return importlib.import_module(name)
    except ImportError:
        raise EnvironmentProblem(f"{need}. Install it with: pip install 'penstock[{extra}]'.") from None
