"""Starting the ranks of a run on one node or several, watching them, and restarting them after a fault.

Only `meeting`, by which the agents of several nodes find each other, imports torch. So an agent of one node starts in a
tenth of a second and takes little memory.
"""

from __future__ import annotations

from typing import Final

LAUNCH: Final = "PENSTOCK_LAUNCH"
"""Environment variable that names the launch of which a rank is a part: the same in all its lives, on all nodes."""
ELASTIC: Final = "PENSTOCK_ELASTIC"
"""Environment variable that is set for ranks whose number may change from one start to the next."""
