"""Checkpoints: their content, how it is committed, and what is verified before it is used.

docs/how-to/checkpoints.md has a loop that saves and resumes on any number of ranks. With torch.distributed, all ranks
make the same calls.
"""

from __future__ import annotations

from penstock.checkpoint.background import BackgroundSaver as BackgroundSaver
from penstock.checkpoint.commit import clean as clean
from penstock.checkpoint.commit import save as save
from penstock.checkpoint.commit import settle as settle
from penstock.checkpoint.commit import steps as steps
from penstock.checkpoint.manifest import Manifest as Manifest
from penstock.checkpoint.manifest import verify as verify
from penstock.checkpoint.reader import Checkpoint as Checkpoint
from penstock.checkpoint.reader import find as find
from penstock.checkpoint.reader import load as load
from penstock.checkpoint.reader import open_together as open_together
from penstock.checkpoint.reader import open_verified as open_verified
from penstock.checkpoint.reader import trusted as trusted
from penstock.checkpoint.snapshot import Snapshot as Snapshot
from penstock.checkpoint.tree import by_index as by_index
from penstock.checkpoint.tree import by_name as by_name
