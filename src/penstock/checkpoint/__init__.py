"""Checkpoints: what is written, how it is committed, and what is believed when it is read."""

from __future__ import annotations

from penstock.checkpoint.commit import Manifest as Manifest
from penstock.checkpoint.commit import Snapshot as Snapshot
from penstock.checkpoint.commit import clean as clean
from penstock.checkpoint.commit import load as load
from penstock.checkpoint.commit import newest as newest
from penstock.checkpoint.commit import save as save
from penstock.checkpoint.commit import steps as steps
from penstock.checkpoint.commit import verify as verify
