"""Lazy packages: names are imported on their first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any


def face(package: str, removed: Mapping[str, str] = {}) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and `__all__` of a package, for the names and modules that the stub next to its `__init__`
    imports. `removed` maps removed names to what to do instead."""
    stub = pkgutil.get_data(package, "__init__.pyi")  # in an archive too
    assert stub is not None
    homes = {name: home for home, name in re.findall(r"(?m)^from (\S+) import (\w+) as", stub.decode())}

    def resolve(name: str) -> Any:
        if name in removed:  # not AttributeError, whose reason `from package import name` would not show
            raise ImportError(f"{package}.{name} was removed; {removed[name]}.")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a package inside it
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return resolve, sorted(name for name, home in homes.items() if home != package)
