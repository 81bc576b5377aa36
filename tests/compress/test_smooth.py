"""Smoothing changes no output, whatever family a model is of, and takes outliers out of inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.families import ENROLLED, batches
from penstock.compress.calibrate import record
from penstock.compress.quantise import candidates
from penstock.compress.smooth import norm_readers, smooth
from penstock.errors import ConfigError
from penstock.models import create

LAST = {"bert", "bert of classes", "marian", "bart", "marian moe", "diffusion moe", "experts of blocks"}
"""Families whose norms come last, or have no weights."""


@pytest.mark.parametrize("name", ENROLLED)
def test_outputs_stay_the_same_and_outliers_go(name: str) -> None:
    config: Any = ENROLLED[name].config
    torch.manual_seed(0)
    model = create(config).eval()
    arguments = batches(config, 0, 4)[:-1]
    readers = norm_readers(model)
    assert (not readers) == (name in LAST)
    with torch.no_grad():
        for norm, names in readers:
            for parameter in model.get_submodule(norm).parameters():
                parameter[:2] *= 50
            for reader in names:
                weight: Any = model.get_submodule(reader).weight
                weight[..., :2] /= 50
        expected = model(*arguments)
        linears = dict.fromkeys([*candidates(model, "int8")[0], *(n for one in readers for n in one.linears)])
        gains = smooth(model, record(model, [arguments], linears), 0.5)
        found = model(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gains.keys() == {one.norm for one in readers}
    assert all(gain > 3 for gain in gains.values()), gains
    again = record(model, [arguments], linears)
    for norm, names in readers:
        largest = torch.stack([again[reader].largest for reader in names]).amax(0)
        assert float(largest.max() / largest.median()) < 30, norm


def test_every_reader_of_a_norm_is_known_by_its_role() -> None:
    readers = dict(norm_readers(create(ENROLLED["qwen moe"].config)))
    block = "decoder.blocks.0"
    assert readers[f"{block}.norm1"] == (f"{block}.attention.qkv",)
    assert set(readers[f"{block}.norm2"]) == {f"{block}.mlp.up", f"{block}.mlp.router"}
    crossing = dict(norm_readers(create(ENROLLED["t5"].config)))
    assert crossing["decoder.blocks.0.cross_norm"] == ("decoder.blocks.0.cross.q",), "keys read the memory"
    with pytest.raises(ConfigError, match="does not say whether its norms come first"):
        norm_readers(nn.Linear(2, 2))
