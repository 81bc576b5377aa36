"""Decoding: models generate text token by token, with a cache of keys and values."""

from __future__ import annotations
