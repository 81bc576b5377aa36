"""Faces of packages: names that are imported on their first use, so that the package itself costs nothing."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any


def face(package: str, removed: Mapping[str, str] = {}) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and `__all__` of a package, of the names and modules that the stub beside its `__init__`
    imports. `removed` says of names that are gone what to do without them."""
    stub = pkgutil.get_data(package, "__init__.pyi")  # in an archive too
    assert stub is not None
    homes = {name: home for home, name in re.findall(r"(?m)^from (\S+) import (\w+) as", stub.decode())}

    def resolve(name: str) -> Any:
        if name in removed:  # no AttributeError, of which `from package import name` would not say the reason
            raise ImportError(f"{package}.{name} was removed; {removed[name]}.")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a package inside it
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return resolve, sorted(name for name, home in homes.items() if home != package)
