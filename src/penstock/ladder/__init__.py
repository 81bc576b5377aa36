"""The ladder: every optimisation on this machine, one rung at a time, predicted beside measured.

Most names are resolved on first use: results and pages can be read where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.ladder.page import to_html as to_html

if TYPE_CHECKING:
    from penstock.ladder.climb import ladder as ladder
    from penstock.ladder.result import Estimate as Estimate
    from penstock.ladder.result import LadderReport as LadderReport
    from penstock.ladder.result import Progress as Progress
    from penstock.ladder.result import RungResult as RungResult
    from penstock.ladder.rung import Rung as Rung
    from penstock.ladder.rung import Setting as Setting
    from penstock.ladder.rung import Situation as Situation
    from penstock.ladder.rung import register as register
    from penstock.ladder.settings import LadderConfig as LadderConfig
    from penstock.ladder.show import table as table
    from penstock.ladder.show import write as write

_NAMES = {
    "climb": ("ladder",),
    "result": ("Estimate", "LadderReport", "Progress", "RungResult"),
    "rung": ("Rung", "Setting", "Situation", "register"),
    "settings": ("LadderConfig",),
    "show": ("table", "write"),
}
"""Public names by module."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.ladder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.ladder.{_HOME[name]}"), name)
