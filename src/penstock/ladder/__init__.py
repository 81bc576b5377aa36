"""The ladder: every optimisation on this machine, one rung at a time, predicted beside measured.

Names are resolved on first use: results and pages can be read where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ladder.climb import ladder as ladder
    from penstock.ladder.page import to_html as to_html
    from penstock.ladder.result import LadderReport as LadderReport
    from penstock.ladder.result import RungResult as RungResult
    from penstock.ladder.rung import Rung as Rung
    from penstock.ladder.rung import Setting as Setting
    from penstock.ladder.rung import Situation as Situation
    from penstock.ladder.rung import register as register
    from penstock.ladder.settings import LadderConfig as LadderConfig
    from penstock.ladder.show import table as table
    from penstock.ladder.show import write as write

_HOME = {
    "LadderConfig": "settings",
    "LadderReport": "result",
    "Rung": "rung",
    "RungResult": "result",
    "Setting": "rung",
    "Situation": "rung",
    "ladder": "climb",
    "register": "rung",
    "table": "show",
    "to_html": "page",
    "write": "show",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.ladder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.ladder.{_HOME[name]}"), name)
