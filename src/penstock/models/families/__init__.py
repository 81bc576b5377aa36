"""One file per enrolled family: its anatomy, and how it switches attention and layout."""

from __future__ import annotations

import functools


@functools.cache
def load() -> None:
    """Enrol the families that ship with Penstock, once. None of them imports a foreign library."""
    from penstock.models import anatomy
    from penstock.models.families import hf_vit, timm_vit, vit

    for module in (vit, timm_vit, hf_vit):
        for class_path, family in module.FAMILIES.items():
            # One that a user enrolled earlier under the same path stays.
            anatomy._FAMILIES.setdefault(class_path, family)
