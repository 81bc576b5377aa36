"""Tiny models whose experts labels choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from helpers.generation import tiny
from penstock.models import create
from penstock.models.model import Model


def routed(name: str) -> Model:
    """A model of which labels 0 and 2 have expert 3, and label 1 has expert 1, with weights as `tiny` draws them."""
    given: dict[str, Any] = {"experts": 4, "experts_per_token": 1, "router": "given", "labels": 3}
    config: Any = tiny(name).config
    given["expert_of"] = (3, 1, 3)
    if name == "gpt":
        config = replace(config, **given)
    else:
        config = replace(
            config, encoder=replace(config.encoder, **given), decoder=replace(config.decoder, **given)
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = create(config, dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()
