"""Mixtures of experts that start from dense weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import ENROLLED, batches, small
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import load_weights, save_pretrained
from penstock.models.convert.upcycle import Upcycling
from penstock.models.experts import mixtures_of

TWO: dict[str, Any] = {"experts": 4, "experts_per_token": 2}


def _mixed(config: Any, **changes: Any) -> Any:
    if config.family == "seq2seq":
        return replace(
            config, encoder=replace(config.encoder, **changes), decoder=replace(config.decoder, **changes)
        )
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt", TWO), ("llama", {**TWO, "experts_per_token": 4, "expert_every": 2}),
    ("marian", {**TWO, "router": "sigmoid"}), ("t5", {"experts": 2, "router": "given"}), ("vit", TWO),
    ("pruned", TWO)],
)  # fmt: skip
def test_an_upcycled_mixture_starts_as_the_dense_model(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of a folder of ours or of transformers, and of a state dict."""
    torch.manual_seed(1)
    config: Any = ENROLLED[name].config
    dense = create(config).eval()
    more = (
        {"unequal": tuple(replace(one, mixture=True) for one in config.unequal)} if name == "pruned" else {}
    )
    save_pretrained(dense, tmp_path)
    *arguments, _ = batches(config, 0, 3)
    given = {"routes": torch.tensor([0, 1, 1])} if changes.get("router") == "given" else {}
    for source in (tmp_path, dense.state_dict()):
        mixture = create(_mixed(config, **changes, **more)).eval()
        with pytest.raises(ConfigError, match="The weights are dense"):
            load_weights(mixture, source)
        loaded = load_weights(mixture, source, upcycling=Upcycling())
        assert loaded.upcycled
        assert mixtures_of(mixture)
        with torch.no_grad():
            torch.testing.assert_close(mixture(*arguments, **given), dense(*arguments))
    for part in mixtures_of(mixture):
        assert torch.equal(part.up.weight[0], part.up.weight[-1])
        assert part.router is None or part.router.weight.std() > 0
    again = create(mixture.config)  # what was upcycled once is weights of a mixture
    assert not load_weights(again, mixture.state_dict(), upcycling=Upcycling()).upcycled


def test_noise_of_a_seed_makes_experts_differ() -> None:
    config: Any = small("llama-tiny")
    dense = create(config).state_dict()
    weights = []
    for seed in (0, 0, 1):
        mixture = create(replace(config, **TWO))
        load_weights(mixture, dense, upcycling=Upcycling(noise=0.1, seed=seed))
        weights.append(mixtures_of(mixture)[0].up.weight.detach())
    plain = dense["decoder.blocks.0.mlp.up.weight"]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    for one, other in zip(weights[0], weights[0].roll(1, 0)):
        assert float((one - plain).std() / plain.std()) == pytest.approx(0.1, rel=0.1)
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_experts": 1}, "model.shared_experts to 0"),
        ({"expert_width": 16}, "perceptron of 32 hidden features, but model.expert_width is 16"),
        ({"depth": 3}, "The weights lack"),
    ],
)
def test_what_cannot_be_copied_is_refused(changes: dict[str, Any], words: str) -> None:
    config: Any = small("gpt-tiny")
    with pytest.raises(ConfigError, match=words):
        load_weights(
            create(replace(config, **TWO, **changes)), create(config).state_dict(), upcycling=Upcycling()
        )
