"""The families that Penstock knows: one file per library, each with anatomies and how to switch attention.

Importing this enrols them. None of them imports a foreign library; a user's enrolment replaces ours.
"""

from __future__ import annotations

from penstock.models.families import ours, timm, transformers

__all__ = ["ours", "timm", "transformers"]
