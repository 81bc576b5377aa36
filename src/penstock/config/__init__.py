"""Configuration as frozen dataclasses. Nothing in this package imports torch."""
