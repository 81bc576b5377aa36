"""Checkpoints: what is written, how it is committed, and what is believed when it is read.

A run on any number of ranks saves and goes on like this; where torch.distributed runs, all ranks call alike:

    snapshot = Snapshot(
        step=step,
        weights={"weights": model.state_dict()},  # DTensors as they are
        state={"optimizer": by_name(optimizer.state_dict()), "loader": loader.state_dict()},
        config=config,
        local=random_state(),  # of this rank
    )
    save(folder, snapshot)  # or saver.start(snapshot), with saver = BackgroundSaver(folder) made once

    clean(folder)
    stored = find(folder)  # verified; no tensor read
    snapshot = stored.load(dict(model.named_parameters()), rank=rank, world=world)
    model.load_state_dict(snapshot.weights["weights"])
    optimizer.load_state_dict(by_index(snapshot.state["optimizer"], optimizer.state_dict()))

`newest` reads everything whole instead, for models that each rank holds whole.
"""

from __future__ import annotations

from penstock.checkpoint.background import BackgroundSaver as BackgroundSaver
from penstock.checkpoint.commit import clean as clean
from penstock.checkpoint.commit import save as save
from penstock.checkpoint.commit import steps as steps
from penstock.checkpoint.manifest import Manifest as Manifest
from penstock.checkpoint.manifest import verify as verify
from penstock.checkpoint.names import by_index as by_index
from penstock.checkpoint.names import by_name as by_name
from penstock.checkpoint.rewrite import convert as convert
from penstock.checkpoint.snapshot import Snapshot as Snapshot
from penstock.checkpoint.stored import Stored as Stored
from penstock.checkpoint.stored import find as find
from penstock.checkpoint.stored import load as load
from penstock.checkpoint.stored import newest as newest
from penstock.checkpoint.stored import open_verified as open_verified
