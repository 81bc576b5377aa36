"""Data that are always there, or a package away, so that every preset trains without --data."""
