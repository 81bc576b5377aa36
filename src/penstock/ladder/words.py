"""A climb's settings in words: what a rung changed, and the command that climbs again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from penstock.config.model import ModelConfig, option_words
from penstock.ladder.settings import LadderConfig


def model_changes(first: ModelConfig | None, model: ModelConfig | None) -> dict[str, Any]:
    """Fields of the model that a setting changes."""
    if first is None or model is None:
        return {}
    return {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if getattr(model, f.name) != getattr(first, f.name)
    }


def command_of(config: LadderConfig) -> str:
    """The command that climbs again with these settings, wherever the call came from."""
    words = ["penstock ladder"]
    words.append(f"--model {config.factory}" if config.factory else " ".join(option_words(config.model)))
    plain = LadderConfig()
    for name in (
        "batch", "procs", "rungs", "skip", "alone", "quick", "rounds", "round_seconds", "loss_steps", "seeds", "lr",
        "budget", "device", "machine", "seed",
    ):  # fmt: skip
        value = getattr(config, name)
        if value == getattr(plain, name) or (
            config.quick and name in ("rounds", "loss_steps", "round_seconds")
        ):
            continue
        if value is True:
            words.append(f"--{name}")
        else:
            words.append(f"--{name} {','.join(value) if isinstance(value, tuple) else value}")
    if config.data.source != "digits":
        words.append(f"--data.source {config.data.source}")
    return " ".join(words)
