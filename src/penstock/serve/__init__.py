"""Serving: a model over HTTP, and the search for a layout that serves given traffic in time."""

from __future__ import annotations
