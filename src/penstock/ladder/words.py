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
    plain, quick = LadderConfig(), ("rounds", "loss_steps", "round_seconds")
    for f in fields(config):
        value = getattr(config, f.name)
        given = value != getattr(plain, f.name) and not (config.quick and f.name in quick)
        if not given or f.name in ("model", "factory", "output"):
            continue
        if f.name == "data":
            words.append(f"--data {value.source}")
        elif value is True:
            words.append(f"--{f.name}")
        else:
            words.append(f"--{f.name} {','.join(value) if isinstance(value, tuple) else value}")
    return " ".join(words)
