"""Checkpoints: what is written, how it is committed, and what is believed when it is read."""

from __future__ import annotations

from penstock.checkpoint.commit import clean as clean
from penstock.checkpoint.commit import save as save
from penstock.checkpoint.commit import steps as steps
from penstock.checkpoint.manifest import Manifest as Manifest
from penstock.checkpoint.manifest import verify as verify
from penstock.checkpoint.snapshot import Snapshot as Snapshot
from penstock.checkpoint.stored import Stored as Stored
from penstock.checkpoint.stored import find as find
from penstock.checkpoint.stored import load as load
from penstock.checkpoint.stored import newest as newest
from penstock.checkpoint.stored import open_verified as open_verified
