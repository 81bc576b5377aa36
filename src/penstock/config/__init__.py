"""Configuration: frozen dataclasses are the one truth. Nothing in here imports torch."""
