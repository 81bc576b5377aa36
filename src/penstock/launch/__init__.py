"""Starts the ranks of a run on one node or several, watches them, and restarts them after a fault.

Only `meeting`, by which the agents of several nodes find each other, imports torch. So an agent of one node starts in a
tenth of a second and uses little memory.
"""

from __future__ import annotations

from typing import Final

LAUNCH: Final = "PENSTOCK_LAUNCH"
"""Environment variable with the name of the launch that a rank belongs to: the same in all its lives, on all nodes."""
ELASTIC: Final = "PENSTOCK_ELASTIC"
"""Environment variable that is set for ranks whose number may change between starts."""
