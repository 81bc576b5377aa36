"""Decoding: how models make text token by token, over a cache of keys and values."""

from __future__ import annotations
