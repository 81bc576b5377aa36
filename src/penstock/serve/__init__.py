"""Serving: a model behind HTTP, and which layout serves a traffic in time."""

from __future__ import annotations
