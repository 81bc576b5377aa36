"""Starting the ranks of a run on one node or several, watching them, and starting them again after a fault.

Free of torch, but for `nodes`, by which the agents of several nodes find each other: an agent of one node is up in a
tenth of a second and holds little memory.
"""

from __future__ import annotations

from typing import Final

ELASTIC: Final = "PENSTOCK_ELASTIC"
"""Environment variable of ranks that are to go on with as many of them as there are."""
