"""Helpers that only tests import."""
