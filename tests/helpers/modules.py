"""Programs beside the package, such as those of tools/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def loaded(path: Path, name: str = "") -> ModuleType:
    """The module of a file; other modules find it under its name, if one is given."""
    name = name or f"of_tests.{path.parent.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look there for types of fields
    spec.loader.exec_module(module)
    return module
