"""The type in which each operation runs: op lists as data, and the code that applies them.

`torch.autocast` does most of the work. A list is applied as its *differences* from torch.autocast's own choices on the
device, so that a list without differences costs nothing.
"""

from __future__ import annotations

from penstock.precision.lists.mode import region as region
from penstock.precision.lists.modules import apply_modules as apply_modules
from penstock.precision.lists.modules import fp32_modules_of as fp32_modules_of
from penstock.precision.lists.modules import restore_modules as restore_modules
from penstock.precision.lists.op_lists import OWN_FUNCTION
from penstock.precision.lists.op_lists import OpLists as OpLists
from penstock.precision.lists.op_lists import autocast_policy as autocast_policy
from penstock.precision.lists.op_lists import default_lists as default_lists
from penstock.precision.lists.op_lists import differences as differences
from penstock.precision.lists.table import Policy as Policy


def __getattr__(name: str) -> object:
    if name.endswith("_function"):
        raise ImportError(f"{name} was removed; a function can cast by itself: {OWN_FUNCTION}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
