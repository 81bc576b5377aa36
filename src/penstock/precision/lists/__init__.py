"""The type in which each operation runs: op lists as data, and the code that applies them.

`torch.autocast` does most of the work. A list is applied as its *differences* from torch.autocast's own choices on the
device, so that a list without differences costs nothing.
"""

from __future__ import annotations

from penstock.precision.lists.mode import fp32_function as fp32_function
from penstock.precision.lists.mode import half_function as half_function
from penstock.precision.lists.mode import promote_function as promote_function
from penstock.precision.lists.mode import region as region
from penstock.precision.lists.modules import apply_modules as apply_modules
from penstock.precision.lists.modules import fp32_modules_of as fp32_modules_of
from penstock.precision.lists.modules import restore_modules as restore_modules
from penstock.precision.lists.op_lists import OpLists as OpLists
from penstock.precision.lists.op_lists import autocast_policy as autocast_policy
from penstock.precision.lists.op_lists import default_lists as default_lists
from penstock.precision.lists.op_lists import differences as differences
from penstock.precision.lists.table import Policy as Policy


def __getattr__(name: str) -> object:
    if name.startswith("register_") and name.endswith("_function"):
        kind = name.removeprefix("register_")
        raise ImportError(f"{name} was removed; replace the function: library.f = {kind}(library.f).")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
