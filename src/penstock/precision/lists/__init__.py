"""Which operation runs in which type: op lists as data, and what applies them.

`torch.autocast` does most of the work. A list is applied as its *differences* from what torch.autocast does by itself
on the device, so that a list without differences costs nothing.
"""

from __future__ import annotations

from penstock.precision.lists.functions import (
    Registration,
    fp32_function,
    half_function,
    promote_function,
    register_fp32_function,
    register_half_function,
    register_promote_function,
)
from penstock.precision.lists.mode import region
from penstock.precision.lists.modules import apply_modules, fp32_modules_of, restore_modules
from penstock.precision.lists.op_lists import OpLists, autocast_policy, default_lists, differences
from penstock.precision.lists.table import Policy

__all__ = [
    "OpLists",
    "Policy",
    "Registration",
    "apply_modules",
    "autocast_policy",
    "default_lists",
    "differences",
    "fp32_function",
    "fp32_modules_of",
    "half_function",
    "promote_function",
    "region",
    "register_fp32_function",
    "register_half_function",
    "register_promote_function",
    "restore_modules",
]
