"""What `penstock train NAME` does without another word: settings that suit a preset, or what it is trained for.

Each table is a layer of a configuration, above the general defaults and below a file and the command line. A setting
that is not in it has its general default.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]
"""Values by dotted key."""

JOBS: dict[str, Settings] = {
    # About 1,440 images are used 60 times. A mirrored digit is another sign, so nothing is flipped. Crops are
    # mild, because one of eight pixels already moves a stroke.
    "vit-digits": {
        "recipe.epochs": 60.0,
        "recipe.lr": 5e-4,
        "recipe.warmup_steps": 20,
        "recipe.eval_every_epochs": 10.0,
        "recipe.augment.flip": 0.0,
        "recipe.augment.crop_scale_min": 0.7,
        "plan.micro_batch": 64,
    },
}
"""By preset."""
